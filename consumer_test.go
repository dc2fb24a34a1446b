package nsq

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

var nopHandler = HandlerFunc(func(*Message) error { return nil })

func TestNewConsumerChecksConfigThenTopicThenChannel(t *testing.T) {
	bad := NewConfig()
	bad.DeflateLevel = 100
	tests := map[string]struct {
		topic, channel string
		config         *Config
		err            string
	}{
		"nil config":          {topic: "", channel: "", config: nil, err: "NewConfig()"},
		"literal config":      {topic: "", channel: "", config: &Config{}, err: "NewConfig()"},
		"config out of range": {topic: "a b", channel: "", config: bad, err: "invalid DeflateLevel ! 100 > 9"},
		"bad topic":           {topic: "a b", channel: "a b", config: NewConfig(), err: "invalid topic name"},
		"empty topic":         {topic: "", channel: "c", config: NewConfig(), err: "invalid topic name"},
		"bad channel":         {topic: "t", channel: "a b", config: NewConfig(), err: "invalid channel name"},
		"long channel":        {topic: "t", channel: strings.Repeat("c", 65), config: NewConfig(), err: "invalid channel name"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			r, err := NewConsumer(tt.topic, tt.channel, tt.config)
			require.Nil(t, r)
			require.ErrorContains(t, err, tt.err)
		})
	}
	r, err := NewConsumer("t", "c#ephemeral", NewConfig())
	require.NoError(t, err)
	require.NotNil(t, r.StopChan)
}

func TestConsumerCopiesItsConfig(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		cfg := NewConfig()
		cfg.Dial, cfg.MaxInFlight = n.cluster.Dial, 7
		r, err := NewConsumer("t", "c", cfg)
		require.NoError(t, err)
		r.SetLogger(nil, LogLevelInfo)
		cfg.Dial, cfg.MaxInFlight, cfg.HeartbeatInterval = nil, 1, -1
		r.AddHandler(nopHandler)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.cluster.waitEntry(byLine("RDY 7"))
		stopConsumer(t, r, time.Minute)
	})
}

// connects are all the calls that connect, on addresses that are fine.
var connects = map[string]func(r *Consumer) error{
	"ConnectToNSQD":        func(r *Consumer) error { return r.ConnectToNSQD("nsqd-1:4150") },
	"ConnectToNSQDs":       func(r *Consumer) error { return r.ConnectToNSQDs([]string{"nsqd-1:4150", "nsqd-2:4150"}) },
	"ConnectToNSQLookupd":  func(r *Consumer) error { return r.ConnectToNSQLookupd("l1:4161") },
	"ConnectToNSQLookupds": func(r *Consumer) error { return r.ConnectToNSQLookupds([]string{"l1:4161", "l2:4161"}) },
}

func TestConnectErrorsComeInOrder(t *testing.T) {
	var nilHandler *nopPointerHandler
	var nilFunc HandlerFunc
	tests := map[string]struct {
		prepare func(r *Consumer)
		err     string
	}{
		"without a handler":    {prepare: func(r *Consumer) {}, err: "no handlers"},
		"nil handler":          {prepare: func(r *Consumer) { r.AddHandler(nil) }, err: "nil handler"},
		"nil pointer":          {prepare: func(r *Consumer) { r.AddHandler(nilHandler) }, err: "nil handler"},
		"nil func":             {prepare: func(r *Consumer) { r.AddHandler(nilFunc) }, err: "nil handler"},
		"concurrency 0":        {prepare: func(r *Consumer) { r.AddConcurrentHandlers(nopHandler, 0) }, err: "concurrency of 0"},
		"negative concurrency": {prepare: func(r *Consumer) { r.AddConcurrentHandlers(nopHandler, -3) }, err: "concurrency of -3"},
		"a good one beside a wrong one": {prepare: func(r *Consumer) {
			r.AddHandler(nil)
			r.AddHandler(nopHandler)
		}, err: "nil handler"},
		"stopped": {prepare: func(r *Consumer) {
			r.AddHandler(nopHandler)
			r.Stop()
		}, err: "consumer stopped"},
		"stopped, without a handler": {prepare: func(r *Consumer) { r.Stop() }, err: "consumer stopped"},
		"stopped, nil handler": {prepare: func(r *Consumer) {
			r.AddHandler(nil)
			r.Stop()
			<-r.StopChan
		}, err: "consumer stopped"},
	}
	for name, tt := range tests {
		for call, connect := range connects {
			t.Run(name+", "+call, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					cluster := newFakeCluster(t, "nsqd-1:4150", "nsqd-2:4150")
					lookupds := newFakeLookupds(t, "l1:4161", "l2:4161")
					r := newTestConsumer(t, cluster, nil)
					r.SetLookupdHttpClient(lookupds.client())
					defer stopConsumer(t, r, time.Second)
					tt.prepare(r)
					err := connect(r)
					require.ErrorContains(t, err, tt.err)
					require.Equal(t, 1, strings.Count(err.Error(), tt.err), "once, not for each address")
					require.Empty(t, cluster.snapshot())
					require.Empty(t, lookupds.asked(""))
					// The checks come before the address is looked at.
					require.Equal(t, err, r.ConnectToNSQD(""))
					require.Equal(t, err, r.ConnectToNSQLookupd(""))
					if !strings.Contains(name, "stopped") {
						require.NotPanics(t, func() { r.AddHandler(nopHandler) }, "a call that failed its checks fixes nothing")
					}
				})
			})
		}
	}
}

type nopPointerHandler struct{}

func (*nopPointerHandler) HandleMessage(*Message) error { return nil }

func TestEmptyListsOfAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestConsumer(t, newFakeCluster(t), nil)
		require.NoError(t, r.ConnectToNSQDs(nil))
		require.NoError(t, r.ConnectToNSQLookupds(nil))
		require.NotPanics(t, func() { r.AddHandler(nopHandler) })
		stopConsumer(t, r, time.Second)
	})
}

func TestAddHandlerPanicsOnceConnected(t *testing.T) {
	for call, connect := range connects {
		for _, dead := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, dead %v", call, dead), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					cluster := newFakeCluster(t, "nsqd-1:4150", "nsqd-2:4150")
					lookupds := newFakeLookupds(t, "l1:4161", "l2:4161")
					if dead {
						cluster.nsqd("nsqd-1:4150").down()
						cluster.nsqd("nsqd-2:4150").down()
						lookupds.at("l1:4161").refused()
					}
					r := newTestConsumer(t, cluster, nil)
					r.SetLookupdHttpClient(lookupds.client())
					defer stopConsumer(t, r, time.Second)
					r.AddHandler(nopHandler)
					require.Error(t, r.ConnectToNSQD("nsqd-1"))
					require.Equal(t, errMissingPort, r.ConnectToNSQLookupd("l1"))
					require.NotPanics(t, func() { r.AddHandler(nopHandler) }, "a wrong address is none yet")
					_ = connect(r)
					require.PanicsWithValue(t, "already connected", func() { r.AddHandler(nopHandler) })
					require.PanicsWithValue(t, "already connected", func() { r.AddConcurrentHandlers(nil, 0) })
				})
			})
		}
	}
}

func TestConnectToNSQDReturnsWhyItFailed(t *testing.T) {
	text := func(want string) func(t *testing.T, err error) {
		return func(t *testing.T, err error) { require.EqualError(t, err, want) }
	}
	code := func(want string) func(t *testing.T, err error) {
		return func(t *testing.T, err error) {
			var perr *ProtocolError
			require.ErrorAs(t, err, &perr)
			require.Equal(t, want, perr.Code)
		}
	}
	timeout := func(step string) func(t *testing.T, err error) {
		return func(t *testing.T, err error) {
			var late *TimeoutError
			require.ErrorAs(t, err, &late)
			require.Equal(t, step, late.Step)
		}
	}
	is := func(want error) func(t *testing.T, err error) {
		return func(t *testing.T, err error) { require.ErrorIs(t, err, want) }
	}
	tests := map[string]struct {
		arrange func(n *fakeNSQD)
		tune    func(cfg *Config)
		check   func(t *testing.T, err error)
		took    time.Duration
	}{
		"refused":    {arrange: func(n *fakeNSQD) { n.down() }, check: is(syscall.ECONNREFUSED)},
		"black hole": {arrange: func(n *fakeNSQD) { n.setReach(reachHangs) }, check: is(context.DeadlineExceeded), took: time.Second},
		"silent": {
			arrange: func(n *fakeNSQD) { n.setReach(reachSilent) }, check: timeout("IDENTIFY"), took: time.Minute,
		},
		"IDENTIFY refused": {
			arrange: func(n *fakeNSQD) {
				n.at("IDENTIFY", fakeStep{err: "E_BAD_BODY IDENTIFY heartbeat interval (999) is invalid"})
			},
			check: func(t *testing.T, err error) {
				var refused ErrIdentify
				require.ErrorAs(t, err, &refused)
				code("E_BAD_BODY")(t, err)
			},
		},
		"SUB refused":      {arrange: func(n *fakeNSQD) { n.set(func(b *fakeBehaviour) { b.refuseSubs = 1 }) }, check: code("E_SUB_FAILED")},
		"no answer to SUB": {arrange: func(n *fakeNSQD) { n.at("SUB", fakeStep{never: true}) }, check: timeout("SUB"), took: time.Minute},
		"AUTH needed":      {arrange: func(n *fakeNSQD) { n.set(func(b *fakeBehaviour) { b.authSecret = "x" }) }, check: text("Auth Required")},
		"AUTH refused": {
			arrange: func(n *fakeNSQD) { n.set(func(b *fakeBehaviour) { b.authSecret = "x" }) },
			tune:    func(cfg *Config) { cfg.AuthSecret = "s3cret" },
			check: func(t *testing.T, err error) {
				require.ErrorContains(t, err, "Error authenticating ")
				var perr *ProtocolError
				require.ErrorAs(t, err, &perr)
				require.NotContains(t, err.Error(), "s3cret")
			},
		},
		"no TLS": {arrange: func(n *fakeNSQD) {}, tune: func(cfg *Config) { cfg.TlsV1 = true }, check: is(ErrTLSRefused)},
		"HTTP":   {arrange: func(n *fakeNSQD) { n.at("IDENTIFY", fakeStep{raw: fakeHTTPAnswer, hangUp: true}) }, check: is(ErrHTTPResponse)},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNSQD(t)
				tt.arrange(n)
				r := newTestConsumer(t, n.cluster, tt.tune)
				r.AddHandler(nopHandler)
				defer stopConsumer(t, r, time.Second)
				start := time.Now()
				err := r.ConnectToNSQD(n.addr)
				require.Error(t, err)
				tt.check(t, err)
				require.Equal(t, tt.took, time.Since(start))
				require.Equal(t, err, r.Status().NSQDs[0].LastError)
				synctest.Wait()
				require.Zero(t, n.cluster.openConns(), "nothing is left open")
			})
		})
	}
}

func TestAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var dialled []string
		r := newTestConsumer(t, newFakeCluster(t), func(cfg *Config) {
			cfg.Dial = func(_ context.Context, network, addr string) (net.Conn, error) {
				mu.Lock()
				defer mu.Unlock()
				dialled = append(dialled, network+" "+addr)
				return nil, syscall.ECONNREFUSED
			}
		})
		r.AddHandler(nopHandler)
		defer stopConsumer(t, r, time.Second)
		for _, bad := range []string{"", " ", "nsqd", "nsqd:", ":", "nsqd:0", "nsqd:nsq", " nsqd:4150", "nsqd:4150\n", "http://nsqd:4150", "::1", "unix:"} {
			var ae *AddressError
			require.ErrorAs(t, r.ConnectToNSQD(bad), &ae, "%q", bad)
			require.Equal(t, bad, ae.Address)
			require.Same(t, ErrNotConnected, r.DisconnectFromNSQD(bad), "%q", bad)
			if strings.Contains(bad, "://") {
				bad = "http://"
			}
			require.Error(t, r.ConnectToNSQLookupd(bad), "%q", bad)
			require.Same(t, ErrNotConnected, r.DisconnectFromNSQLookupd(bad), "%q", bad)
		}
		require.Empty(t, dialled)
	})
}

func TestDialledAddresses(t *testing.T) {
	for addr, want := range map[string]string{
		"nsqd:4150":             "tcp nsqd:4150",
		"10.0.0.1:4150":         "tcp 10.0.0.1:4150",
		"[::1]:4150":            "tcp [::1]:4150",
		"[fe80::1%eth0]:4150":   "tcp [fe80::1%eth0]:4150",
		"/run/nsqd.sock":        "unix /run/nsqd.sock",
		"./nsqd.sock":           "unix ./nsqd.sock",
		"unix:/run/nsqd.sock":   "unix /run/nsqd.sock",
		"unix:///run/nsqd.sock": "unix /run/nsqd.sock",
	} {
		t.Run(want, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNSQD(t)
				dialled := make(chan string, 1)
				r := newTestConsumer(t, n.cluster, func(cfg *Config) {
					cfg.Dial = func(ctx context.Context, network, target string) (net.Conn, error) {
						dialled <- network + " " + target
						return n.cluster.Dial(ctx, network, n.addr)
					}
				})
				from := make(chan string, 1)
				r.AddHandler(HandlerFunc(func(m *Message) error {
					from <- m.NSQDAddress
					return nil
				}))
				defer stopConsumer(t, r, time.Minute)
				n.publish("x")
				require.NoError(t, r.ConnectToNSQD(addr))
				require.Equal(t, want, <-dialled)
				require.Equal(t, addr, <-from, "messages name the address that was configured")
				require.Equal(t, addr, r.Status().NSQDs[0].Address)
				require.NoError(t, r.DisconnectFromNSQD(addr))
			})
		})
	}
}

func TestUnixSocket(t *testing.T) {
	checkNoLeaks(t)
	path := filepath.Join(t.TempDir(), "nsqd.sock")
	listener, err := net.Listen("unix", path)
	require.NoError(t, err)
	cluster := newFakeCluster(t, path)
	cluster.wg.Go(func() {
		<-cluster.closed
		listener.Close()
	})
	n := cluster.nsqd(path)
	cluster.wg.Go(func() { n.acceptLoop(listener) })
	r, err := NewConsumer("t", "c", NewConfig())
	require.NoError(t, err)
	r.SetLogger(nil, LogLevelInfo)
	got := make(chan string, 1)
	r.AddHandler(HandlerFunc(func(m *Message) error {
		got <- m.NSQDAddress + " " + string(m.Body)
		return nil
	}))
	n.publish("x")
	require.NoError(t, r.ConnectToNSQD(path))
	require.Equal(t, path+" x", <-got)
	stopConsumer(t, r, 10*time.Second)
	require.Error(t, func() error {
		other, err := NewConsumer("t", "c", NewConfig())
		require.NoError(t, err)
		defer stopConsumer(t, other, time.Second)
		other.SetLogger(nil, LogLevelInfo)
		other.AddHandler(nopHandler)
		return other.ConnectToNSQD(path + ".not")
	}())
}

func TestSameNSQDIsConnectedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		n.set(func(b *fakeBehaviour) { b.dialDelay = 500 * time.Millisecond })
		r := newTestConsumer(t, n.cluster, nil)
		r.AddHandler(nopHandler)
		defer stopConsumer(t, r, time.Second)
		results := make(chan error, 10)
		for range 10 {
			go func() { results <- r.ConnectToNSQD(n.addr) }()
		}
		good := 0
		for range 10 {
			if err := <-results; err == nil {
				good++
			} else {
				require.Same(t, ErrAlreadyConnected, err)
			}
		}
		require.Equal(t, 1, good)
		require.Same(t, ErrAlreadyConnected, r.ConnectToNSQD(n.addr))
		require.Same(t, ErrAlreadyConnected, r.ConnectToNSQDs([]string{n.addr}), "counts as an error")
		require.Len(t, n.dialTimes(), 1)
	})
}

func TestConnectToNSQDsTriesAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cluster := newFakeCluster(t, "a:4150", "hangs:4150", "b:4150", "refuses:4150", "c:4150")
		cluster.nsqd("hangs:4150").setReach(reachHangs)
		cluster.nsqd("refuses:4150").down()
		r := newTestConsumer(t, cluster, func(cfg *Config) { cfg.MaxInFlight = 10 })
		r.AddHandler(nopHandler)
		defer stopConsumer(t, r, time.Second)
		start := time.Now()
		err := r.ConnectToNSQDs([]string{"hangs:4150", "a:4150", "b:4150", "", "refuses:4150", "c:4150", "c:4150"})
		require.Equal(t, time.Second, time.Since(start), "at the same time")
		require.Equal(t, []string{"a:4150", "b:4150", "c:4150"}, nsqdsConnected(r))
		for _, part := range []error{context.DeadlineExceeded, syscall.ECONNREFUSED, ErrAlreadyConnected} {
			require.ErrorIs(t, err, part)
		}
		var ae *AddressError
		require.ErrorAs(t, err, &ae)

		single := r.ConnectToNSQDs([]string{"refuses:4150"})
		require.Equal(t, r.Status().NSQDs[4].LastError, single, "a single one as it is")
	})
}

func TestConnectToLookupdsTakesTheGoodOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161", "l2:4161")
		r := newDiscoveringConsumer(t, newFakeCluster(t), lookupds, nil)
		err := r.ConnectToNSQLookupds([]string{"l1:4161", "host", "l2:4161", "host:abc"})
		require.ErrorIs(t, err, errMissingPort)
		var ae *AddressError
		require.ErrorAs(t, err, &ae)
		require.Equal(t, "host:abc", ae.Address)
		require.Len(t, r.Status().NSQLookupds, 2)
		require.Len(t, lookupds.asked(""), 2)
		require.Equal(t, errMissingPort, r.ConnectToNSQLookupds([]string{"l1:4161", "host"}), "a single one as it is")
	})
}

func TestConnectAfterStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newTestConsumer(t, n.cluster, nil)
		r.AddHandler(nopHandler)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		stopConsumer(t, r, time.Second)
		for call, connect := range connects {
			require.EqualError(t, connect(r), "consumer stopped", call)
		}
		require.Same(t, ErrNotConnected, r.DisconnectFromNSQD("nsqd-2:4150"))
		require.Same(t, ErrNotConnected, r.DisconnectFromNSQLookupd("l1:4161"))
		require.NotPanics(t, func() {
			_ = r.DisconnectFromNSQD(n.addr)
			r.ChangeMaxInFlight(10)
			r.SetLogger(nil, LogLevelError)
			_, _, _ = r.Stats(), r.Status(), r.IsStarved()
		})
		time.Sleep(time.Hour)
		require.Len(t, n.dialTimes(), 1)
	})
}

func TestStopWhileConnecting(t *testing.T) {
	for name, reach := range map[string]fakeReach{"in a dial": reachHangs, "in a handshake": reachSilent} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNSQD(t)
				n.setReach(reach)
				r := newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.DialTimeout = 0 })
				r.AddHandler(nopHandler)
				result := make(chan error, 1)
				go func() { result <- r.ConnectToNSQDs([]string{n.addr}) }()
				time.Sleep(time.Second)
				stopConsumer(t, r, 99*time.Millisecond)
				require.Equal(t, errConsumerStopped, <-result)
			})
		})
	}
}

func TestSetLookupdHttpClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := newFakeLookupds(t, "l1:4161"), newFakeLookupds(t, "l1:4161")
		r := newDiscoveringConsumer(t, newFakeCluster(t), a, nil)
		r.SetLookupdHttpClient(b.client())
		require.NoError(t, r.ConnectToNSQLookupd("l1:4161"))
		require.Empty(t, a.asked(""))
		require.Len(t, b.asked(""), 1)

		// Its own timeout counts, ours where it has none.
		slow := b.at("l1:4161")
		slow.hangs()
		time.Sleep(125 * time.Second)
		require.ErrorIs(t, r.Status().NSQLookupds[0].LastError, context.DeadlineExceeded)
		own := b.client()
		own.Timeout = 5 * time.Minute
		r.SetLookupdHttpClient(own)
		time.Sleep(3 * time.Minute)
		asked := len(b.asked(""))
		time.Sleep(2 * time.Minute)
		require.Len(t, b.asked(""), asked)

		r.SetLookupdHttpClient(nil)
		r.mu.Lock()
		require.Same(t, r.lookups.own, r.lookups.client)
		r.lookups.client = &http.Client{Transport: b}
		r.mu.Unlock()
	})
}

func TestHandlersShareTheMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.MaxInFlight = 10 })
		var mu sync.Mutex
		counts := map[string]int{}
		most := map[string]int{}
		handler := func(name string) HandlerFunc {
			now := 0
			return func(*Message) error {
				mu.Lock()
				now++
				counts[name]++
				most[name] = max(most[name], now)
				mu.Unlock()
				time.Sleep(time.Second)
				mu.Lock()
				now--
				mu.Unlock()
				return nil
			}
		}
		r.AddHandler(handler("one"))
		r.AddConcurrentHandlers(handler("three"), 3)
		r.AddConcurrentHandlers(handler("three more"), 3)
		defer stopConsumer(t, r, time.Minute)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.publishN(70)
		n.cluster.waitUntil(func() bool { return n.stats().Finished == 70 })
		mu.Lock()
		defer mu.Unlock()
		require.Equal(t, map[string]int{"one": 1, "three": 3, "three more": 3}, most)
		require.Equal(t, map[string]int{"one": 10, "three": 30, "three more": 30}, counts)
	})
}
