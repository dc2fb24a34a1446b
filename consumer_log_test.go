package nsq

import (
	"crypto/tls"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// keptLog is a logger that keeps lines, for use by many goroutines.
type keptLog struct {
	mu    sync.Mutex // guards lines
	lines []string
}

func (l *keptLog) Output(_ int, s string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, s)
	return nil
}

// all returns the lines of the levels ("ERR" and so on), or all.
func (l *keptLog) all(levels ...string) (found []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.lines {
		if len(levels) == 0 {
			found = append(found, line)
		}
		for _, lvl := range levels {
			if strings.HasPrefix(line, lvl+" ") {
				found = append(found, line)
			}
		}
	}
	return found
}

// matching returns the lines of a level whose text, behind topic and channel, matches the expression from its start.
func (l *keptLog) matching(level, text string) (found []string) {
	re := regexp.MustCompile(`^` + level + ` +\d+ \[t/c\] ` + text)
	for _, line := range l.all() {
		if re.MatchString(line) {
			found = append(found, line)
		}
	}
	return found
}

func (l *keptLog) clear() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = nil
}

// logTo sends all lines of r to a new log.
func logTo(r *Consumer) *keptLog {
	l := &keptLog{}
	r.SetLogger(l, LogLevelDebug)
	return l
}

func TestLogLinesOfAConsumer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		n.set(func(b *fakeBehaviour) { b.maxRDY, b.authSecret, b.snappy = 3, "s3cret", true })
		r := newTestConsumer(t, n.cluster, func(cfg *Config) {
			cfg.MaxInFlight, cfg.AuthSecret, cfg.Snappy, cfg.MaxAttempts = 5, "s3cret", true, 2
			cfg.DefaultRequeueDelay = 0
		})
		log := logTo(r)
		r.AddHandler(HandlerFunc(func(m *Message) error {
			switch string(m.Body) {
			case "bad":
				return errors.New("this one is bad")
			case "slow":
				time.Sleep(5 * time.Second)
			}
			return nil
		}))
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.publish("good")
		time.Sleep(time.Minute)
		n.publish("bad")
		time.Sleep(30 * time.Second)
		n.publish("good", "good")
		time.Sleep(30 * time.Second)
		n.conn().sendError("E_FIN_FAILED FIN 0000000000000001 failed ID not in flight")
		time.Sleep(time.Second)
		n.conn().drop()
		time.Sleep(time.Second)
		n.publish("slow", "good")
		time.Sleep(time.Second)
		stopConsumer(t, r, time.Minute)

		const addr = `\(nsqd-1:4150\) `
		for _, want := range []struct{ level, text string }{
			{"DBG", addr + `IDENTIFY response: .*`},
			{"DBG", addr + `sending RDY 3$`},
			{"DBG", addr + `FIN 0000000000000001$`},
			{"DBG", addr + `REQ 0000000000000002$`},
			{"DBG", addr + `heartbeat received$`},
			{"DBG", `starting Handler$`},
			{"DBG", `stopping Handler$`},
			{"INF", addr + `connecting to nsqd$`},
			{"INF", addr + `upgrading to Snappy$`},
			{"INF", addr + `Auth accepted\. .*`},
			{"INF", addr + `re-connecting in \d+.*`},
			{"INF", addr + `received CLOSE_WAIT from nsqd$`},
			{"INF", `stopping\.\.\.$`},
			{"INF", `stopping handlers$`},
			{"INF", addr + `beginning close$`},
			{"INF", addr + `readLoop exiting$`},
			{"INF", addr + `clean close complete$`},
			{"INF", `rdyLoop exiting$`},
			{"WRN", addr + `max RDY count 3 < consumer max in flight 5, truncation possible$`},
			{"WRN", `backing off for 2s \(backoff level 1\), setting all to RDY 0$`},
			{"WRN", `backoff timeout expired, sending RDY 1$`},
			{"WRN", `exiting backoff, returning all to RDY \d$`},
			{"WRN", `there are 0 connections left alive$`},
			{"WRN", `msg 0000000000000002 attempted 3 times, giving up`},
			{"WRN", addr + `delaying close, 1 outstanding messages$`},
			{"WRN", addr + `IO error - .+`}, // go-nsq's level is Error
			{"ERR", `Handler returned error \(this one is bad\) for msg 0000000000000002$`},
			{"ERR", addr + `protocol error - E_FIN_FAILED FIN 0000000000000001 failed ID not in flight$`},
		} {
			require.NotEmpty(t, log.matching(want.level, want.text), "%s %s\nin\n%s", want.level, want.text, strings.Join(log.all(), "\n"))
		}
		for _, line := range log.all() {
			require.Regexp(t, `^(DBG|INF|WRN|ERR)  +\d+ \[t/c\] \S`, line)
			require.NotContains(t, line, "s3cret")
			require.NotContains(t, line, "\n")
		}
	})
}

func TestLogLinesOfFailedConnects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newDirectConsumer(t, n.cluster, nil)
		log := logTo(r)
		n.down()
		require.Error(t, r.ConnectToNSQD(n.addr))
		synctest.Wait()
		require.Empty(t, log.all("WRN", "ERR"), "an error is returned or logged")
		n.up()
		n.at("IDENTIFY", fakeStep{err: "E_AUTH_FAILED AUTH failed"})
		require.Error(t, r.ConnectToNSQD(n.addr))
		n.at("IDENTIFY", fakeStep{})
		require.NoError(t, r.ConnectToNSQD(n.addr))
		time.Sleep(time.Second)
		n.down()
		time.Sleep(time.Hour)
		lines := log.matching("(WRN|ERR)", `\(nsqd-1:4150\) error connecting to nsqd - .*refused.*`)
		require.True(t, 55 <= len(lines) && len(lines) <= 70, "about one a minute: %d", len(lines))
		require.True(t, strings.HasPrefix(lines[0], "WRN"), lines[0])
		require.True(t, strings.HasPrefix(lines[len(lines)-1], "ERR"), "what lasts needs a person")
		require.Regexp(t, `\(and \d+ more like this\)`, lines[len(lines)-1])
	})
}

func TestLossOfTheLastConnectionIsAWarningWithItsCause(t *testing.T) {
	lose := map[string]struct {
		act   func(n *fakeNSQD)
		cause string
	}{
		"nsqd shuts down": {act: (*fakeNSQD).closeAll, cause: "EOF"},
		"reset":           {act: (*fakeNSQD).dropAll, cause: "reset by peer"},
		"silence":         {act: func(n *fakeNSQD) { n.set(func(b *fakeBehaviour) { b.silent = true }) }, cause: "heartbeat timeout"},
		"fatal error":     {act: func(n *fakeNSQD) { n.conn().sendError("E_INVALID no such thing") }, cause: "E_INVALID no such thing"},
		"nonsense":        {act: func(n *fakeNSQD) { n.conn().sendSize(-1) }, cause: "negative frame size"},
	}
	for name, tt := range lose {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNSQD(t)
				r := newDirectConsumer(t, n.cluster, nil)
				log := logTo(r)
				require.NoError(t, r.ConnectToNSQD(n.addr))
				time.Sleep(time.Second)
				n.setReach(reachRefused)
				tt.act(n)
				time.Sleep(2 * time.Minute)
				require.Len(t, log.matching("WRN", `there are 0 connections left alive`), 1)
				told := log.matching("(WRN|ERR)", `\(nsqd-1:4150\) (IO|protocol) error - .*`+tt.cause)
				require.Len(t, told, 1, "once: nsqd's own complaint as protocol error, all else as IO error")
				require.Equal(t, name == "fatal error", strings.Contains(told[0], "protocol error"))
				require.ErrorContains(t, r.Status().NSQDs[0].LastError, "refused")
			})
		})
	}
}

func TestNormalLifeHasNoErrorLines(t *testing.T) {
	skipUnderRace(t, "what is logged")
	t.Parallel()
	type env struct {
		t        *testing.T
		r        *Consumer
		lookupds *fakeLookupds
		cluster  *fakeCluster
	}
	minutes := func(n int) { time.Sleep(time.Duration(n)*time.Minute + time.Second) }
	tests := map[string]struct {
		life     func(e env)
		warnings bool // some are fine
	}{
		"start and clean stop under traffic": {
			life: func(e env) {
				e.cluster.nsqd("a:4150").flood(time.Millisecond)
				e.cluster.nsqd("b:4150").flood(time.Millisecond)
				require.NoError(e.t, e.r.ConnectToNSQDs([]string{"a:4150", "b:4150"}))
				time.Sleep(time.Second)
			},
			warnings: true, // delaying close
		},
		"idle and stopped": {life: func(e env) {
			require.NoError(e.t, e.r.ConnectToNSQDs([]string{"a:4150", "b:4150"}))
			minutes(5)
		}},
		"an idle hour": {life: func(e env) {
			e.lookupds.at("l1:4161").list("a:4150", "b:4150")
			require.NoError(e.t, e.r.ConnectToNSQLookupd("l1:4161"))
			minutes(60)
		}},
		"a rebalance": {life: func(e env) { // one busy, then the other; shares move
			require.NoError(e.t, e.r.ConnectToNSQDs([]string{"a:4150", "b:4150"}))
			for range 3 {
				for _, addr := range []string{"a:4150", "b:4150"} {
					e.cluster.nsqd(addr).flood(50 * time.Millisecond)
					time.Sleep(20 * time.Second)
					e.cluster.nsqd(addr).stopFlood()
				}
				e.r.ChangeMaxInFlight(20)
				e.r.ChangeMaxInFlight(100)
			}
			time.Sleep(time.Second)
		}},
		"disconnect": {life: func(e env) {
			require.NoError(e.t, e.r.ConnectToNSQDs([]string{"a:4150", "b:4150"}))
			require.NoError(e.t, e.r.DisconnectFromNSQD("a:4150"))
			minutes(1)
		}},
		"a topic that does not exist yet": {life: func(e env) {
			require.NoError(e.t, e.r.ConnectToNSQLookupds([]string{"l1:4161", "l2:4161"}))
			minutes(5)
		}},
		"nobody serves the topic": {life: func(e env) {
			e.lookupds.at("l1:4161").list()
			require.NoError(e.t, e.r.ConnectToNSQLookupd("l1:4161"))
			minutes(5)
		}},
		"one failed lookup": {
			life: func(e env) {
				require.NoError(e.t, e.r.ConnectToNSQLookupds([]string{"l1:4161", "l2:4161"}))
				e.lookupds.at("l1:4161").broken()
				minutes(1)
				e.lookupds.at("l1:4161").notFound()
				minutes(5)
			},
			warnings: true,
		},
		"restart of one nsqd of several": {
			life: func(e env) {
				require.NoError(e.t, e.r.ConnectToNSQDs([]string{"a:4150", "b:4150"}))
				for range 10 {
					minutes(1)
					e.cluster.nsqd("a:4150").down()
					time.Sleep(20 * time.Second)
					e.cluster.nsqd("a:4150").up()
				}
			},
			warnings: true,
		},
		"restart of a machine with an nsqd and a nsqlookupd": {
			life: func(e env) {
				e.lookupds.at("l1:4161").list("a:4150", "b:4150")
				e.lookupds.at("l2:4161").list("a:4150", "b:4150")
				require.NoError(e.t, e.r.ConnectToNSQLookupds([]string{"l1:4161", "l2:4161"}))
				for range 10 {
					minutes(1)
					e.cluster.nsqd("a:4150").down()
					e.lookupds.at("l1:4161").refused()
					time.Sleep(20 * time.Second)
					e.cluster.nsqd("a:4150").up()
					e.lookupds.at("l1:4161").list("a:4150", "b:4150")
				}
			},
			warnings: true,
		},
		"nsqd vanishes": {life: func(e env) {
			e.lookupds.at("l1:4161").list("a:4150", "b:4150")
			require.NoError(e.t, e.r.ConnectToNSQLookupd("l1:4161"))
			e.lookupds.at("l1:4161").list("a:4150")
			minutes(10)
		}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cluster := newFakeCluster(t, "a:4150", "b:4150")
				lookupds := newFakeLookupds(t, "l1:4161", "l2:4161")
				r := newDiscoveringConsumer(t, cluster, lookupds, nil)
				log := logTo(r)
				tt.life(env{t, r, lookupds, cluster})
				stopConsumer(t, r, time.Minute)
				require.Empty(t, log.all("ERR"))
				if !tt.warnings {
					require.Empty(t, log.all("WRN"))
				}
			})
		})
	}
}

func TestCleanStopUnderTrafficHasNoErrorLines(t *testing.T) {
	t.Parallel()
	for stack, layers := range layerStacks {
		t.Run(stack, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				n.set(func(b *fakeBehaviour) { b.tls, b.snappy, b.deflate = layers.tls, layers.snappy, layers.deflate })
				r := newTestConsumer(t, n.cluster, func(cfg *Config) {
					cfg.TlsV1, cfg.Snappy, cfg.Deflate, cfg.MaxInFlight = layers.tls, layers.snappy, layers.deflate, 20
					cfg.TlsConfig = &tls.Config{RootCAs: fakeCert().pool}
				})
				log := logTo(r)
				r.AddConcurrentHandlers(HandlerFunc(func(*Message) error { time.Sleep(5 * time.Millisecond); return nil }), 3)
				n.flood(time.Millisecond)
				require.NoError(t, r.ConnectToNSQD(n.addr))
				time.Sleep(time.Duration(fewer(1000)) * time.Millisecond)
				stopConsumer(t, r, time.Minute)
				n.stopFlood()
				require.Empty(t, log.all("ERR"))
				for _, line := range log.all("WRN") {
					require.Contains(t, line, "delaying close", "which tells that handlers are at work")
				}
			})
		})
	}
}

func TestLogLinesOfLookups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161")
		n := newFakeNSQD(t)
		r := newDiscoveringConsumer(t, n.cluster, lookupds, nil)
		log := logTo(r)
		l := lookupds.at("l1:4161")
		require.NoError(t, r.ConnectToNSQLookupd("http://user:passw0rd@l1:4161"))
		const url = `http://xxxxx@l1:4161/lookup`
		require.Len(t, log.matching("INF", `querying nsqlookupd `+url+`$`), 1)
		unknown := `nsqlookupd ` + url + ` does not know topic t`
		time.Sleep(5 * time.Minute)
		require.Len(t, log.matching("INF", unknown), 1, "once")
		l.list(n.addr)
		time.Sleep(61 * time.Second)
		l.notFound()
		time.Sleep(5 * time.Minute)
		require.Len(t, log.matching("INF", unknown), 2, "and then on change")

		log.clear()
		l.broken()
		time.Sleep(100 * time.Minute)
		failed := `error querying nsqlookupd \(` + url + `\) - .*500`
		warnings, errs := log.matching("WRN", failed), log.matching("ERR", failed)
		require.Len(t, warnings, 2, "the first ones are warnings")
		require.Len(t, errs, 6, "what lasts is an error, less and less often: 3, 4, 8, 16, 32, 64")
		for _, line := range log.all() {
			require.NotContains(t, line, "passw0rd")
		}
	})
}

func TestUnknownHostIsLoggedWithItsAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161")
		lookupds.at("l1:4161").list("inside.the.container:4150")
		r := newDiscoveringConsumer(t, newFakeCluster(t), lookupds, nil)
		log := logTo(r)
		require.NoError(t, r.ConnectToNSQLookupd("l1:4161"))
		synctest.Wait()
		require.Len(t, log.matching("WRN", `\(inside.the.container:4150\) error connecting to nsqd - .*no such host`), 1)
	})
}

func TestSecretsAreNeverToldAnywhere(t *testing.T) {
	const secret, password = "s3cret-token", "passw0rd"
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		n.set(func(b *fakeBehaviour) { b.authSecret = "another one" })
		lookupds := newFakeLookupds(t, "l1:4161", "l2:4161", "l3:4161")
		lookupds.at("l1:4161").list(n.addr)
		lookupds.at("l2:4161").respondWith(403, "the token "+secret+" is not welcome")
		lookupds.at("l3:4161").refused()
		r := newDiscoveringConsumer(t, n.cluster, lookupds, func(cfg *Config) { cfg.AuthSecret = secret })
		log := logTo(r)
		var errs []error
		errs = append(errs,
			r.ConnectToNSQLookupds([]string{"l1:4161", "http://me:" + password + "@l2:4161", "http://me:" + password + "@l3:4161",
				"http://me:" + password + "@l3:x", "me:" + password + "@l3:4161"}),
			r.ConnectToNSQD("me:"+password+"@nsqd:4150"),
			r.ConnectToNSQD(n.addr),
			r.DisconnectFromNSQLookupd("http://me:"+password+"@l3:4161"),
			r.DisconnectFromNSQLookupd("http://me:"+password+"@l2:4161"),
			r.DisconnectFromNSQLookupd("l1:4161"),
		)
		n.set(func(b *fakeBehaviour) { b.authSecret = secret })
		time.Sleep(3 * time.Minute)
		n.publishN(3)
		n.dropAll()
		time.Sleep(time.Minute)
		require.Equal(t, 3, n.stats().Finished)
		told := []string{fmt.Sprintf("%+v", r.Status()), fmt.Sprintf("%+v", *r.Stats()), fmt.Sprint(errs)}
		for _, row := range r.Status().NSQLookupds {
			told = append(told, fmt.Sprint(row.LastError))
		}
		stopConsumer(t, r, time.Minute)
		for _, text := range append(told, log.all()...) {
			require.NotContains(t, text, secret)
			require.NotContains(t, text, password)
		}
		require.NotEmpty(t, log.all("DBG"))
	})
}

func TestLoggerMayBeChangedAtAnyTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newDirectConsumer(t, n.cluster, nil)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				for i := range 200 {
					switch i % 4 {
					case 0:
						r.SetLogger(&keptLog{}, LogLevelDebug)
					case 1:
						r.SetLoggerForLevel(&keptLog{}, LogLevelWarning)
					case 2:
						r.SetLoggerLevel(LogLevel(i % 3))
					case 3:
						r.SetLogger(nil, LogLevelInfo)
					}
					time.Sleep(10 * time.Millisecond)
				}
			})
		}
		wg.Go(func() {
			for range 10 {
				time.Sleep(200 * time.Millisecond)
				n.dropAll()
			}
		})
		wg.Wait()
	})
}

func TestLoggerMayCallTheConsumer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		lookupds := newFakeLookupds(t, "l1:4161")
		lookupds.at("l1:4161").list(n.addr, "gone:4150")
		r := newTestConsumer(t, n.cluster, nil)
		r.SetLookupdHttpClient(lookupds.client())
		r.AddConcurrentHandlers(HandlerFunc(func(m *Message) error { return errors.New("no") }), 5)
		r.SetLogger(funcLogger(func(int, string) error {
			r.Status()
			r.Stats()
			r.IsStarved()
			return nil
		}), LogLevelDebug)
		require.NoError(t, r.ConnectToNSQLookupd("l1:4161"))
		require.Same(t, ErrAlreadyConnected, r.ConnectToNSQD(n.addr))
		n.publishN(10)
		time.Sleep(10 * time.Second)
		n.down()
		time.Sleep(time.Minute)
		require.NoError(t, r.DisconnectFromNSQD(n.addr))
		stopConsumer(t, r, time.Minute)
	})
}
