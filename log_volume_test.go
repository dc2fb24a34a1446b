package nsq

import (
	"errors"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// What goes wrong again and again is logged when it begins, and then at a slow beat: an hour of it does not fill the disk,
// and can't be missed either. The default level is Info, so its lines count too.
func TestAnHourOfTroubleIsLoggedInFewLines(t *testing.T) {
	skipUnderRace(t, "how many lines are logged")
	t.Parallel()
	type env struct {
		t        *testing.T
		r        *Consumer
		n, other *fakeNSQD
		l        *fakeLookupd
	}
	direct := func(e env) {
		require.NoError(e.t, e.r.ConnectToNSQDs([]string{e.n.addr, e.other.addr}))
		time.Sleep(time.Minute)
	}
	discovered := func(e env) {
		e.l.list(e.n.addr, e.other.addr)
		require.NoError(e.t, e.r.ConnectToNSQLookupd("l1:4161"))
		time.Sleep(time.Minute)
	}
	down := func(e env) { e.n.down() }
	refuse := func(step, text string) func(e env) {
		return func(e env) { e.n.at(step, fakeStep{err: text}); e.n.dropAll() }
	}
	// dying has each connection end after a while.
	dying := func(after time.Duration, end func(c *fakeConn)) func(e env) {
		return func(e env) {
			e.n.set(func(b *fakeBehaviour) {
				b.afterCommand = func(c *fakeConn, line string) {
					if line == "SUB t c" {
						time.AfterFunc(after, func() { end(c) })
					}
				}
			})
			e.n.dropAll()
		}
	}
	fail := func() func(e env) { return func(e env) { e.n.flood(5 * time.Second) } }
	for name, test := range map[string]struct {
		tune    func(cfg *Config)
		handler func(m *Message) error
		start   func(e env)
		trouble func(e env)
		quiet   bool // no warnings at all
		text    string
		lines   int // in an hour, from Info on
	}{
		"nothing, by address": {start: direct, trouble: func(env) {}, quiet: true, lines: 0},
		"nothing, by lookup":  {start: discovered, trouble: func(env) {}, quiet: true, lines: 62},
		"nothing, with polls every five seconds": {
			tune: func(cfg *Config) { cfg.LookupdPollInterval = 5 * time.Second }, start: discovered, trouble: func(env) {}, quiet: true, lines: 75,
		},
		"nsqd is down":                      {start: direct, trouble: down, text: "error connecting to nsqd - .*refused", lines: 250},
		"nsqd is down and listed":           {start: discovered, trouble: down, text: "error connecting to nsqd - .*refused", lines: 220},
		"nsqd hangs":                        {start: direct, trouble: func(e env) { e.n.setReach(reachHangs); e.n.dropAll() }, text: "error connecting to nsqd - ", lines: 250},
		"AUTH is refused":                   {start: direct, trouble: refuse("AUTH", "E_AUTH_FAILED no"), text: ".*E_AUTH_FAILED no", lines: 300},
		"AUTH is refused, and it is listed": {start: discovered, trouble: refuse("AUTH", "E_AUTH_FAILED no"), text: ".*E_AUTH_FAILED no", lines: 370},
		"SUB is refused":                    {start: direct, trouble: refuse("SUB", "E_SUB_FAILED no"), text: ".*E_SUB_FAILED no", lines: 300},
		"TLS is gone": {
			start: direct, trouble: func(e env) {
				e.n.set(func(b *fakeBehaviour) { b.editIdentify = func(m map[string]any) { m["tls_v1"] = true } })
				e.n.dropAll()
			},
			text: "error connecting to nsqd - .*TLS", lines: 300,
		},
		"nsqd hangs up at once":                   {start: direct, trouble: dying(0, (*fakeConn).close), text: "IO error - EOF", lines: 600},
		"nsqd hangs up after 20 s":                {start: direct, trouble: dying(20*time.Second, (*fakeConn).close), text: "IO error - EOF", lines: 600},
		"nsqd hangs up after 20 s, and is listed": {start: discovered, trouble: dying(20*time.Second, (*fakeConn).close), text: "IO error - EOF", lines: 700},
		"nsqd complains after 20 s": {
			start: direct, trouble: dying(20*time.Second, func(c *fakeConn) { c.sendError("E_INVALID no") }), text: "protocol error - E_INVALID no", lines: 600,
		},
		"AUTH runs out after 20 s": {
			start: direct, trouble: dying(20*time.Second, func(c *fakeConn) { c.sendError("E_AUTH_FAILED expired") }), text: "protocol error - E_AUTH_FAILED expired", lines: 600,
		},
		"lookupd is down":           {start: discovered, trouble: func(e env) { e.l.refused() }, text: "error querying nsqlookupd .*refused", lines: 75},
		"lookupd hangs":             {start: discovered, trouble: func(e env) { e.l.hangs() }, text: "error querying nsqlookupd ", lines: 75},
		"lookupd and nsqd are down": {start: discovered, trouble: func(e env) { e.l.refused(); e.n.down() }, text: "error querying nsqlookupd .*refused", lines: 250},
		"lookupd fails in turns": {
			start: discovered,
			trouble: func(e env) {
				for i := range 60 {
					[]func(){e.l.refused, e.l.garbage, e.l.broken}[i%3]()
					time.Sleep(time.Minute)
				}
			},
			text: "error querying nsqlookupd ", lines: 200,
		},
		"lookupd lists nonsense": {
			start: discovered, trouble: func(e env) { e.l.respondWith(200, `{"producers":[{"broadcast_address":"a b","tcp_port":1}]}`) },
			text: "nsqlookupd .* nsqds? that can't be dialled", lines: 75,
		},
		"all messages fail": {
			handler: func(*Message) error { return errors.New("no good") }, start: direct, trouble: fail(),
			text: `Handler returned error \(no good\) for msg `, lines: 250,
		},
		"all messages fail, without backoff": {
			tune:    func(cfg *Config) { cfg.MaxBackoffDuration = 0 },
			handler: func(*Message) error { return errors.New("no good") }, start: direct, trouble: fail(),
			text: `Handler returned error \(no good\) for msg `, lines: 850,
		},
		"all handlers panic, without backoff": {
			tune:    func(cfg *Config) { cfg.MaxBackoffDuration = 0 },
			handler: func(*Message) error { panic("no good") }, start: direct, trouble: fail(),
			text: `Handler panicked \(no good\) for msg `, lines: 850,
		},
		"all handlers exit, without backoff": {
			tune:    func(cfg *Config) { cfg.MaxBackoffDuration = 0 },
			handler: func(*Message) error { runtime.Goexit(); return nil }, start: direct, trouble: fail(),
			text: `Handler returned error `, lines: 850,
		},
		"all answers are late": {
			handler: func(*Message) error { time.Sleep(70 * time.Second); return nil }, start: direct, trouble: fail(),
			text: `.*(timeout of|came too late)`, lines: 200,
		},
		"nsqd refuses all answers": {
			start: direct,
			trouble: func(e env) {
				go func() {
					for range 418 {
						e.n.conn().sendError("E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight")
						time.Sleep(10 * time.Second)
					}
				}()
			},
			text: `protocol error - E_FIN_FAILED`, lines: 200,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cluster := newFakeCluster(t, "nsqd-1:4150", "nsqd-2:4150")
				lookupds := newFakeLookupds(t, "l1:4161")
				for _, n := range cluster.nsqds {
					n.set(func(b *fakeBehaviour) { b.authSecret = "s3cret" })
				}
				r := newTestConsumer(t, cluster, func(cfg *Config) {
					cfg.MaxInFlight, cfg.AuthSecret, cfg.LookupdPollJitter = 10, "s3cret", 0
					if test.tune != nil {
						test.tune(cfg)
					}
				})
				r.SetLookupdHttpClient(lookupds.client())
				handler := test.handler
				if handler == nil {
					handler = func(*Message) error { return nil }
				}
				r.AddConcurrentHandlers(HandlerFunc(handler), 10)
				e := env{t, r, cluster.nsqd("nsqd-1:4150"), cluster.nsqd("nsqd-2:4150"), lookupds.at("l1:4161")}
				defer time.Sleep(2 * time.Minute) // handlers that Stop has left behind
				defer stopConsumer(t, r, 5*time.Minute)
				defer e.n.stopFlood()
				test.start(e)
				log := &keptLog{}
				r.SetLogger(log, LogLevelInfo)
				test.trouble(e)
				time.Sleep(time.Hour)
				lines := log.all()
				require.LessOrEqual(t, len(lines), test.lines, "%s", strings.Join(lines[:min(len(lines), 200)], "\n"))
				if test.quiet {
					require.Empty(t, log.all("WRN", "ERR"))
				} else {
					require.NotEmpty(t, log.matching("(WRN|ERR)", `(\(nsqd-1:4150\) )?`+test.text), strings.Join(lines, "\n"))
				}
				log.clear()
				time.Sleep(10 * time.Minute)
				if !test.quiet && !strings.Contains(name, "lookupd") {
					require.NotEmpty(t, log.matching("(WRN|ERR)", `(\(nsqd-1:4150\) )?`+test.text), "it is not forgotten: a line within ten minutes")
				}
			})
		})
	}
}
