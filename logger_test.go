package nsq

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestLogLevels(t *testing.T) {
	var i int = LogLevelMax
	var l LogLevel = LogLevelMax // untyped: both compile
	require.EqualValues(t, i, l)
	require.Equal(t, LogLevelError, l)
	for lvl, want := range map[LogLevel]string{LogLevelDebug: "DBG", LogLevelInfo: "INF", LogLevelWarning: "WRN", LogLevelError: "ERR", -1: "DBG", 4: "DBG"} {
		require.Equal(t, want, lvl.String())
	}
	require.Equal(t, []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError},
		[]slog.Level{LogLevelDebug.slogLevel(), LogLevelInfo.slogLevel(), LogLevelWarning.slogLevel(), LogLevelError.slogLevel()})
}

// lineRecorder keeps lines and call depths.
type lineRecorder struct {
	lines []string
	depth []int
}

func (r *lineRecorder) Output(calldepth int, s string) error {
	r.lines = append(r.lines, s)
	r.depth = append(r.depth, calldepth)
	return errors.New("not the library's business")
}

func (r *lineRecorder) take() []string {
	lines := r.lines
	r.lines = nil
	return lines
}

func TestLogLines(t *testing.T) {
	rec := &lineRecorder{}
	g := consumerLoggers(1, "topic", "channel")
	g.set(rec, LogLevelDebug)
	g.logf(LogLevelDebug, "starting Handler")
	g.logf(LogLevelInfo, "re-connecting in %s", time.Second)
	g.forConn("127.0.0.1:4150").logf(LogLevelWarning, "100%%")
	p := producerLoggers(1234, "127.0.0.1:4150")
	p.set(rec, LogLevelDebug)
	p.logf(LogLevelError, "x")
	c := connLoggers("127.0.0.1:4150")
	c.set(rec, LogLevelDebug)
	c.logf(LogLevelError, "x")
	require.Equal(t, []string{
		"DBG    1 [topic/channel] starting Handler",
		"INF    1 [topic/channel] re-connecting in 1s",
		"WRN    1 [topic/channel] (127.0.0.1:4150) 100%",
		"ERR  1234 (127.0.0.1:4150) x",
		"ERR  (127.0.0.1:4150) x",
	}, rec.take())
	for _, d := range rec.depth {
		require.Equal(t, 2, d)
	}
}

func TestLogCallDepth(t *testing.T) {
	var out bytes.Buffer
	g := consumerLoggers(1, "t", "c")
	g.set(log.New(&out, "", log.Lshortfile), LogLevelDebug)
	g.logf(LogLevelDebug, "x")
	require.Regexp(t, `^logger_test\.go:\d+: DBG `, out.String())
}

func TestLogThresholdsAndLevels(t *testing.T) {
	all, warn := &lineRecorder{}, &lineRecorder{}
	g := &loggers{prefix: "p"}
	logAll := func() (string, string) {
		for lvl := LogLevelDebug; lvl <= LogLevelMax; lvl++ {
			before := len(all.lines) + len(warn.lines)
			enabled := g.enabled(lvl)
			g.logf(lvl, "x")
			require.Equal(t, enabled, len(all.lines)+len(warn.lines) > before)
		}
		short := func(r *lineRecorder) string { return strings.ReplaceAll(strings.Join(r.take(), ","), "  p x", "") }
		return short(all), short(warn)
	}
	expect := func(wantAll, wantWarn string) {
		t.Helper()
		a, w := logAll()
		require.Equal(t, []string{wantAll, wantWarn}, []string{a, w})
	}

	expect("", "") // nothing set yet
	g.set(all, LogLevelInfo)
	expect("INF,WRN,ERR", "")
	g.setLevel(LogLevelDebug)
	expect("DBG,INF,WRN,ERR", "")
	g.setForLevel(warn, LogLevelWarning)
	expect("DBG,INF,ERR", "WRN")
	g.setForLevel(nil, LogLevelError)
	expect("DBG,INF", "WRN")
	g.setLevel(LogLevelWarning)
	expect("", "WRN")
	g.setLevel(99)
	expect("", "")
	g.setLevel(-99)
	expect("DBG,INF", "WRN")
	g.setForLevel(all, -1) // no such level: no effect, no panic
	g.setForLevel(all, 4)
	expect("DBG,INF", "WRN")
	g.set(nil, LogLevelDebug)
	expect("", "")
	g.logf(-1, "x")
	g.logf(4, "x")
	require.False(t, g.enabled(4))

	var none *loggers
	require.False(t, none.enabled(LogLevelError))
	none.logf(LogLevelError, "x")
}

type funcLogger func(int, string) error

func (f funcLogger) Output(calldepth int, s string) error { return f(calldepth, s) }

func TestLogTypedNil(t *testing.T) {
	for _, l := range []logger{nil, (*log.Logger)(nil), (*lineRecorder)(nil), funcLogger(nil)} {
		g := consumerLoggers(1, "t", "c")
		g.set(l, LogLevelDebug)
		require.False(t, g.enabled(LogLevelError))
		g.logf(LogLevelError, "x")
		g.setForLevel(l, LogLevelError)
		g.logf(LogLevelError, "x")
		c := g.forConn("a:1")
		c.setWithPrefix(l, LogLevelDebug, "x")
		c.setForLevelWithPrefix(l, LogLevelError, "x")
		c.logf(LogLevelError, "x")
	}
	g := consumerLoggers(1, "t", "c")
	g.setSlog(nil)
	g.logf(LogLevelError, "x")
}

// What a consumer's SetLogger changes reaches the connections that exist.
func TestLogConnectionFollowsConsumer(t *testing.T) {
	first, second, own := &lineRecorder{}, &lineRecorder{}, &lineRecorder{}
	g := consumerLoggers(1, "t", "c")
	g.set(first, LogLevelInfo)
	c := g.forConn("a:1")
	c.logf(LogLevelInfo, "one")
	g.set(second, LogLevelDebug)
	c.logf(LogLevelDebug, "two")
	g.setLevel(LogLevelError)
	c.logf(LogLevelWarning, "no")
	require.Equal(t, []string{"INF    1 [t/c] (a:1) one"}, first.take())
	require.Equal(t, []string{"DBG    1 [t/c] (a:1) two"}, second.take())

	// The connection's own SetLoggerForLevel ends that.
	c.setForLevelWithPrefix(own, LogLevelError, logPrefix("conn %s:", "a:1"))
	c.setLevel(LogLevelWarning)
	g.set(first, LogLevelDebug)
	c.logf(LogLevelError, "three")
	c.logf(LogLevelWarning, "four")
	c.logf(LogLevelInfo, "no")
	require.Equal(t, []string{"ERR  conn a:1: three"}, own.take())
	require.Equal(t, []string{"WRN    1 [t/c] (a:1) four"}, second.take())
	require.Empty(t, first.take())

	c.setWithPrefix(own, LogLevelDebug, logPrefix("", "a:1"))
	c.logf(LogLevelDebug, "five")
	require.Equal(t, []string{"DBG  (a:1) five"}, own.take())
}

func TestLogPrefix(t *testing.T) {
	for format, want := range map[string]string{
		"":               "(a:1)",
		"%s":             "a:1",
		"  1 [t/c] (%s)": "  1 [t/c] (a:1)",
		"none":           "none",
		"%s %s":          "a:1 a:1",
		"100%% %s":       "100% a:1",
		"%d %q %":        "%d %q %",
		"%v":             "a:1",
	} {
		require.Equal(t, want, logPrefix(format, "a:1"), format)
	}
	require.Equal(t, `(a\nb%s)`, logPrefix("", "a\nb%s"))
}

func TestLogSlog(t *testing.T) {
	var out bytes.Buffer
	g := consumerLoggers(1, "t", "c")
	g.setSlog(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{
		AddSource: true,
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			switch a.Key {
			case slog.TimeKey:
				return slog.Attr{}
			case slog.SourceKey:
				return slog.Bool("here", strings.HasSuffix(a.Value.Any().(*slog.Source).File, "logger_test.go"))
			}
			return a
		},
	})).With("app", "x"))
	require.False(t, g.enabled(LogLevelDebug)) // the handler's level
	g.logf(LogLevelDebug, "no")
	g.logf(LogLevelInfo, "stopping...")
	g.forConn("a:1").logf(LogLevelError, "IO error - %s", io.EOF)
	require.Equal(t, "level=INFO here=true msg=stopping... app=x topic=t channel=c\n"+
		"level=ERROR here=true msg=\"IO error - EOF\" app=x topic=t channel=c nsqd=a:1\n", out.String())

	out.Reset()
	g.setLevel(LogLevelError)
	g.logf(LogLevelWarning, "no")
	require.Empty(t, out.String())
}

func TestLogDisabledCostsNothing(t *testing.T) {
	g := consumerLoggers(1, "t", "c")
	g.set(&lineRecorder{}, LogLevelInfo)
	c := g.forConn("a:1")
	id := testID[:]
	require.Zero(t, testing.AllocsPerRun(100, func() {
		c.logf(LogLevelDebug, "heartbeat received")
		if c.enabled(LogLevelDebug) {
			c.logf(LogLevelDebug, "FIN %s", id)
		}
	}))
}

// A logger may log, or change loggers, while it is called.
func TestLogLoggerMayCallBack(t *testing.T) {
	g := consumerLoggers(1, "t", "c")
	calls := 0
	g.set(funcLogger(func(int, string) error {
		if calls++; calls == 1 {
			g.logf(LogLevelError, "again")
			g.setLevel(LogLevelInfo)
			g.set(nil, LogLevelInfo)
		}
		return nil
	}), LogLevelDebug)
	g.logf(LogLevelError, "x")
	require.Equal(t, 2, calls)
}

func TestLogChangesWhileLogging(t *testing.T) {
	g := consumerLoggers(1, "t", "c")
	g.set(nil, LogLevelInfo)
	conns := []*loggers{g.forConn("a:1"), g.forConn("b:1")}
	count := func(calldepth int, s string) error {
		assert.Equal(t, 2, calldepth)
		assert.Contains(t, s, "text 7")
		return nil
	}
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 200 {
				conns[i%2].logf(LogLevelInfo, "text %d", 7)
				g.logf(LogLevelError, "text %d", 7)
			}
		})
		wg.Go(func() {
			for j := range 200 {
				g.set(funcLogger(count), LogLevel(j%4))
				g.setForLevel(nil, LogLevelInfo)
				g.setLevel(LogLevel(j % 4))
				if i == 0 {
					conns[0].setLevel(LogLevelInfo)
				}
			}
		})
	}
	wg.Wait()

	// No change is lost.
	for i := range logLevels {
		wg.Go(func() { g.setForLevel(funcLogger(count), LogLevel(i)) })
	}
	wg.Wait()
	g.setLevel(LogLevelDebug)
	for i := range logLevels {
		require.True(t, g.enabled(LogLevel(i)))
	}
}

func TestNextInstance(t *testing.T) {
	first := nextInstance()
	require.Positive(t, first)
	require.Equal(t, first+1, nextInstance())
}

func TestDefaultLogger(t *testing.T) {
	g := consumerLoggers(1, "t", "c")
	require.False(t, g.enabled(LogLevelDebug))
	require.True(t, g.enabled(LogLevelInfo))
}

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		"":                          "",
		"plain text, \"quoted\" \\": "plain text, \"quoted\" \\",
		"äöü 日本 🙂":                  "äöü 日本 🙂",
		"a\nb\r\tc\x00\x7f":         `a\nb\r\tc\x00\x7f`,
		"\x1b[31mred":               `\x1b[31mred`,
		"\u202eabc\u2028\u0085":     `\u202eabc\u2028\u0085`,
		"\xff\xc3":                  `\xff\xc3`,
		"\ufffd":                    "\ufffd",
		"'\n":                       `'\n`,
	} {
		require.Equal(t, want, printable(in))
		require.Equal(t, want, printable(want), "once is enough")
	}
}

func TestLogGate(t *testing.T) {
	start := time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)
	g := logGate{interval: time.Minute}
	var got []string
	for _, after := range []time.Duration{0, 1, 59 * time.Second, time.Minute - 1, time.Minute, time.Minute + 1, 3 * time.Minute, 3*time.Minute + 1, time.Hour} {
		ok, n := g.allow(start.Add(after))
		got = append(got, fmt.Sprint(ok, n))
	}
	require.Equal(t, []string{"true 0", "false 0", "false 0", "false 0", "true 3", "false 0", "true 1", "false 0", "true 1"}, got)

	ok, n := g.allow(start) // a clock that was set back doesn't silence for good
	require.True(t, ok)
	require.Zero(t, n)

	var zero logGate // no interval: all pass
	for range 3 {
		ok, n := zero.allow(start)
		require.True(t, ok)
		require.Zero(t, n)
	}
}

func BenchmarkLogDisabled(b *testing.B) {
	g := consumerLoggers(1, "t", "c")
	c := g.forConn("a:1")
	b.ReportAllocs()
	for b.Loop() {
		if c.enabled(LogLevelDebug) {
			b.Fatal("enabled")
		}
	}
}
