package nsq

import (
	"crypto/tls"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// What a user is told, by a log line, about a configuration that works otherwise than it may be meant.
func TestHints(t *testing.T) {
	tests := map[string]struct {
		concurrency int
		tune        func(cfg *Config)
		behave      func(b *fakeBehaviour)
		addrs       []string
		text        string
	}{
		"fewer messages than handlers": {
			concurrency: 50, text: "max-in-flight 1 keeps 49 of 50 handlers idle$",
		},
		"fewer messages than nsqds": {
			addrs: []string{"nsqd-1:4150", "nsqd-2:4150", "nsqd-3:4150"},
			tune:  func(cfg *Config) { cfg.MaxInFlight = 2 }, text: "3 nsqds take turns with a max-in-flight of 2$",
		},
		"nsqd takes less than max-in-flight": {
			behave: func(b *fakeBehaviour) { b.maxRDY = 3 },
			tune:   func(cfg *Config) { cfg.MaxInFlight = 5 }, text: `\(nsqd-1:4150\) max RDY count 3 < consumer max in flight 5, truncation possible$`,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				addrs := test.addrs
				if addrs == nil {
					addrs = []string{"nsqd-1:4150"}
				}
				cluster := newFakeCluster(t, addrs...)
				if test.behave != nil {
					cluster.nsqd("nsqd-1:4150").set(test.behave)
				}
				r := newTestConsumer(t, cluster, test.tune)
				log := logTo(r)
				r.AddConcurrentHandlers(nopHandler, max(test.concurrency, 1))
				require.NoError(t, r.ConnectToNSQDs(addrs))
				cluster.nsqd("nsqd-1:4150").publishN(1)
				time.Sleep(90 * time.Second)
				require.Len(t, log.matching("WRN", test.text), 1)
				require.Empty(t, log.all("ERR"))
				stopConsumer(t, r, time.Minute)
			})
		})
	}
}

// A lookup that fails in another way than before is news, and so is one that works again.
func TestLookupErrorsAreLoggedOnChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161")
		r := newDiscoveringConsumer(t, newFakeCluster(t), lookupds, nil)
		require.NoError(t, r.ConnectToNSQLookupd("l1:4161"))
		log := logTo(r)
		lookupds.at("l1:4161").refused()
		time.Sleep(50 * time.Minute)
		require.NotEmpty(t, log.matching("ERR", "error querying nsqlookupd .*refused"))
		log.clear()
		lookupds.at("l1:4161").broken()
		time.Sleep(2 * time.Minute)
		require.Len(t, log.matching("ERR", "error querying nsqlookupd .*500"), 1)
		require.Empty(t, log.matching("INF", "nsqlookupd .* answers again$"))
		lookupds.at("l1:4161").list()
		time.Sleep(10 * time.Minute)
		require.Len(t, log.matching("INF", "nsqlookupd .* answers again$"), 1)
	})
}

// After a row of connects that were not logged each, the one that succeeds is.
func TestConnectionThatIsBackIsLogged(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		r := newDirectConsumer(t, n.cluster, nil)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		log := logTo(r)
		n.down()
		time.Sleep(10*time.Minute + 30*time.Second)
		n.up()
		n.waitSubscribed()
		synctest.Wait()
		said := len(log.matching("INF", `\(nsqd-1:4150\) connected again after 10m`))
		lines := log.all("INF", "WRN", "ERR")
		if said == 0 { // its try was one of those that are logged anyway
			require.Contains(t, lines[len(lines)-1], "connecting to nsqd")
		}
		log.clear()
		time.Sleep(2 * time.Minute)
		n.dropAll()
		synctest.Wait()
		require.Len(t, log.matching("WRN", `\(nsqd-1:4150\) IO error - `), 1, "a connection that has lived is lost aloud")
		require.Len(t, log.matching("WRN", `there are 0 connections left alive$`), 1)
	})
}

// An authorization that runs out in the middle of a session is asked for anew; that is a warning, since it goes on.
func TestAuthorizationThatRunsOut(t *testing.T) {
	for _, code := range []string{"E_AUTH_FAILED", "E_UNAUTHORIZED"} {
		t.Run(code, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				n.set(func(b *fakeBehaviour) { b.authSecret = "s3cret" })
				r := newDirectConsumer(t, n.cluster, func(cfg *Config) { cfg.AuthSecret = "s3cret" })
				require.NoError(t, r.ConnectToNSQD(n.addr))
				log := logTo(r)
				time.Sleep(time.Minute)
				n.conn().sendError(code + " expired")
				time.Sleep(time.Second)
				require.Equal(t, []string{"IDENTIFY", "AUTH", "SUB t c", "IDENTIFY", "AUTH", "SUB t c"}, n.commands("NOP", "RDY"))
				n.publishN(1)
				synctest.Wait()
				require.Equal(t, 1, n.stats().Finished)
				require.Len(t, log.matching("WRN", `\(nsqd-1:4150\) protocol error - `+code+` expired$`), 1)
				require.Empty(t, log.all("ERR"))
			})
		})
	}
}

// The end of the stream is an end in each layer stack: a reader that takes it for "nothing yet" would spin.
func TestEndOfStreamInEveryLayerStack(t *testing.T) {
	t.Parallel()
	for stack, layers := range layerStacks {
		for end, act := range map[string]func(c *fakeConn){"close": (*fakeConn).close, "half": (*fakeConn).closeWrite, "mid-frame": (*fakeConn).closeMidFrame, "reset": (*fakeConn).drop} {
			t.Run(stack+" "+end, func(t *testing.T) {
				inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
					n.set(func(b *fakeBehaviour) { b.tls, b.snappy, b.deflate = layers.tls, layers.snappy, layers.deflate })
					r := newDirectConsumer(t, n.cluster, func(cfg *Config) {
						cfg.TlsV1, cfg.Snappy, cfg.Deflate = layers.tls, layers.snappy, layers.deflate
						cfg.TlsConfig = &tls.Config{RootCAs: fakeCert().pool}
					})
					require.NoError(t, r.ConnectToNSQD(n.addr))
					n.publishN(2)
					synctest.Wait()
					act(n.conn())
					synctest.Wait()
					require.Zero(t, r.Stats().Connections, "noticed at once")
					require.Error(t, r.Status().NSQDs[0].LastError)
					time.Sleep(time.Second)
					n.publishN(2)
					synctest.Wait()
					require.Equal(t, 4, n.stats().Finished)
					require.Len(t, n.dialTimes(), 2)
				})
			})
		}
	}
}
