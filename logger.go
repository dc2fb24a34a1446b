package nsq

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"os"
	"reflect"
	"runtime"
	"strings"
	"sync/atomic"
	"time"
)

// LogLevel is the importance of a log line. A threshold of a level lets lines of that level and above
// pass.
type LogLevel int

// The levels, from the most lines to the fewest.
const (
	LogLevelDebug   LogLevel = 0 // single messages and commands
	LogLevelInfo    LogLevel = 1 // connections come and go
	LogLevelWarning LogLevel = 2 // something failed and is tried again
	LogLevelError   LogLevel = 3 // a person should look
	LogLevelMax              = 3 // the last level
)

const logLevels = LogLevelMax + 1

// String returns the level as it stands in front of a line: DBG, INF, WRN or ERR, and DBG for a level
// that there is not.
func (lvl LogLevel) String() string {
	switch lvl {
	case LogLevelInfo:
		return "INF"
	case LogLevelWarning:
		return "WRN"
	case LogLevelError:
		return "ERR"
	}
	return "DBG"
}

// slogLevel is the level of the same meaning in package slog.
func (lvl LogLevel) slogLevel() slog.Level {
	return slog.Level(4 * (int(lvl) - 1)) // Debug -4, Info 0, Warn 4, Error 8
}

// logger is where lines go to. A *log.Logger is one.
type logger interface {
	Output(calldepth int, s string) error
}

// loggers is where the lines of a consumer, producer or connection go to, per level, and what stands in
// front of them. All methods may be called at any time from any goroutine; logging takes no lock, so a
// logger may call back into the library.
//
// A nil *loggers is silent. A connection's loggers are derived from those of its consumer: they follow it until SetLogger is called
// on the connection itself.
type loggers struct {
	parent *loggers // whose state counts as long as there is none here; or nil
	prefix string   // between level and text, for example "  1 [topic/channel] (127.0.0.1:4150)"
	attrs  []any    // keys and values that say the same to slog

	state atomic.Pointer[logState]
	quiet atomic.Int64 // until then, by monotonic, lines are of LogLevelDebug: they only repeat what was said before
}

// logState is never changed, only replaced.
type logState struct {
	level LogLevel
	sinks [logLevels]logSink
}

// silent is the state of loggers that nobody has set.
var silent logState

// logSink is the target of one level: at most one of logger and slog is set.
type logSink struct {
	logger logger
	slog   *slog.Logger
	prefix string // instead of that of loggers, if own
	own    bool
}

// lastInstance is the number of consumers and producers so far.
var lastInstance atomic.Int64

// nextInstance numbers the consumers and producers of the process from 1, for their log lines.
func nextInstance() int64 { return lastInstance.Add(1) }

// newLoggers returns loggers that write to standard error from Info on. attrs are what the lines get
// as attributes if they go to a slog.Logger; prefix is the same for people.
func newLoggers(prefix string, attrs ...any) *loggers {
	g := &loggers{prefix: prefix, attrs: attrs}
	g.set(log.New(os.Stderr, "", log.Flags()), LogLevelInfo)
	return g
}

// consumerLoggers returns the loggers of a consumer.
func consumerLoggers(instance int64, topic, channel string) *loggers {
	return newLoggers(fmt.Sprintf("%3d [%s/%s]", instance, topic, channel), "topic", topic, "channel", channel)
}

// producerLoggers returns the loggers of a producer.
func producerLoggers(instance int64, addr string) *loggers {
	return newLoggers(fmt.Sprintf("%3d (%s)", instance, printable(addr)), "nsqd", addr)
}

// connLoggers returns the loggers of a connection that belongs to nobody.
func connLoggers(addr string) *loggers {
	return newLoggers(logPrefix("", addr), "nsqd", addr)
}

// forConn returns the loggers of one connection. Changes of g reach them.
func (g *loggers) forConn(addr string) *loggers {
	return &loggers{
		parent: g,
		prefix: g.prefix + " " + logPrefix("", addr),
		attrs:  append(g.attrs[:len(g.attrs):len(g.attrs)], "nsqd", addr),
	}
}

func (g *loggers) load() *logState {
	for ; g != nil; g = g.parent {
		if s := g.state.Load(); s != nil {
			return s
		}
	}
	return &silent
}

// change replaces the state by a changed copy.
func (g *loggers) change(f func(s *logState)) {
	for {
		old := g.state.Load()
		s := *g.load()
		f(&s)
		if g.state.CompareAndSwap(old, &s) {
			return
		}
	}
}

// set sends the lines of all levels to l, those below lvl to nowhere. A nil l silences all.
func (g *loggers) set(l logger, lvl LogLevel) {
	g.setSink(logSink{logger: usable(l)}, lvl)
}

// setForLevel sends the lines of one level to l. A nil l silences it. The threshold stays.
func (g *loggers) setForLevel(l logger, lvl LogLevel) {
	g.setSinkForLevel(logSink{logger: usable(l)}, lvl)
}

// setWithPrefix is set for Conn.SetLogger, where prefix comes from logPrefix.
func (g *loggers) setWithPrefix(l logger, lvl LogLevel, prefix string) {
	g.setSink(logSink{logger: usable(l), prefix: prefix, own: true}, lvl)
}

// setForLevelWithPrefix is setForLevel for Conn.SetLoggerForLevel.
func (g *loggers) setForLevelWithPrefix(l logger, lvl LogLevel, prefix string) {
	g.setSinkForLevel(logSink{logger: usable(l), prefix: prefix, own: true}, lvl)
}

// setSlog sends the lines of all levels to l, which has levels of its own, with attributes in place of
// prefixes. A nil l silences all.
func (g *loggers) setSlog(l *slog.Logger) {
	g.setSink(logSink{slog: l}, LogLevelDebug)
}

// setLevel silences the levels below lvl.
func (g *loggers) setLevel(lvl LogLevel) {
	g.change(func(s *logState) { s.level = lvl })
}

func (g *loggers) setSink(sink logSink, lvl LogLevel) {
	g.change(func(s *logState) {
		s.level = lvl
		for i := range s.sinks {
			s.sinks[i] = sink
		}
	})
}

func (g *loggers) setSinkForLevel(sink logSink, lvl LogLevel) {
	if lvl < 0 || lvl > LogLevelMax {
		return
	}
	g.change(func(s *logState) { s.sinks[lvl] = sink })
}

// usable turns an interface that holds a nil pointer into nil.
func usable(l logger) logger {
	if l == nil {
		return nil
	}
	switch v := reflect.ValueOf(l); v.Kind() {
	case reflect.Pointer, reflect.Map, reflect.Slice, reflect.Func, reflect.Chan:
		if v.IsNil() {
			return nil
		}
	}
	return l
}

// sink returns where lines of level lvl go to, and false if nowhere.
func (g *loggers) sink(lvl LogLevel) (logSink, bool) {
	if lvl < 0 || lvl > LogLevelMax {
		return logSink{}, false
	}
	s := g.load()
	if lvl < s.level {
		return logSink{}, false
	}
	sink := s.sinks[lvl]
	if sink.slog != nil {
		return sink, sink.slog.Enabled(context.Background(), lvl.slogLevel())
	}
	return sink, sink.logger != nil
}

// enabled tells whether a line of level lvl would go anywhere. Ask it before logf where a message passes: what
// logf gets in args is allocated by its caller.
func (g *loggers) enabled(lvl LogLevel) bool {
	_, ok := g.sink(lvl)
	return ok
}

// logf logs a line. It must be called by the function whose line it is, for loggers that print file and
// line. What a peer sent is passed through printable first.
func (g *loggers) logf(lvl LogLevel, format string, args ...any) {
	lvl = g.damped(lvl)
	sink, ok := g.sink(lvl)
	if !ok {
		return
	}
	defer loggerPanicked()
	if sink.slog == nil {
		prefix := g.prefix
		if sink.own {
			prefix = sink.prefix
		}
		// The logger's errors are its own matter: there is no place to report them to.
		_ = sink.logger.Output(2, fmt.Sprintf("%-4s %s %s", lvl, prefix, fmt.Sprintf(format, args...)))
		return
	}
	var pc [1]uintptr
	runtime.Callers(2, pc[:])
	r := slog.NewRecord(time.Now(), lvl.slogLevel(), fmt.Sprintf(format, args...), pc[0])
	r.Add(g.attrs...)
	_ = sink.slog.Handler().Handle(context.Background(), r)
}

// loggerPanicked keeps a panic of the user's logger from ending the process, as that of a test does which is over. The
// line is lost; standard error is the one place left to say so.
func loggerPanicked() {
	if p := recover(); p != nil {
		fmt.Fprintf(os.Stderr, "nsq: the logger panicked: %v\n", p)
	}
}

// hush has lines be of LogLevelDebug until then, by monotonic.
func (g *loggers) hush(until int64) { g.quiet.Store(until) }

// damped is the level that lines of lvl have at present.
func (g *loggers) damped(lvl LogLevel) LogLevel {
	if g == nil || lvl <= LogLevelDebug {
		return lvl
	}
	if until := g.quiet.Load(); until != 0 && monotonic() < until {
		return LogLevelDebug
	}
	return lvl
}

// logPrefix is what stands in front of a connection's lines: format with its %s replaced by the address.
// An empty format is (%s). It is no format for package fmt, so nothing in it can go wrong.
func logPrefix(format, addr string) string {
	if format == "" {
		format = "(%s)"
	}
	return strings.NewReplacer("%%", "%", "%s", printable(addr), "%v", printable(addr)).Replace(format)
}

// logGate lets lines of a kind pass: some at once, and from then on one per interval. It is a plain value: no clock,
// no lock.
type logGate struct {
	interval time.Duration // 0: all pass
	burst    int           // how many may pass at once; 0 is 1

	passed     int       // of burst
	since      time.Time // each interval from here on gives one of them back
	suppressed int       // since the last one that passed
}

// allow tells whether a line may be logged now, and how many were held back since the last one that
// was. The first may at once.
func (g *logGate) allow(now time.Time) (ok bool, suppressed int) {
	if g.interval <= 0 {
		return true, 0
	}
	elapsed := now.Sub(g.since)
	if back := int64(elapsed / g.interval); elapsed < 0 || back >= int64(g.passed) { // also after the clock was set back
		g.passed, g.since = 0, now
	} else {
		g.passed -= int(back)
		g.since = g.since.Add(time.Duration(back) * g.interval)
	}
	if g.passed >= max(g.burst, 1) {
		g.suppressed++
		return false, 0
	}
	suppressed = g.suppressed
	g.passed++
	g.suppressed = 0
	return true, suppressed
}
