package nsq

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestPollsAskAllLookupdsAtTheSameTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161", "l2:4161", "l3:4161")
		cluster := newFakeCluster(t)
		for _, l := range lookupds.servers {
			l.slow(time.Second)
		}
		lookupds.at("l2:4161").broken()
		r := newDiscoveringConsumer(t, cluster, lookupds, nil)
		start := time.Now()
		require.NoError(t, r.ConnectToNSQLookupds([]string{"l1:4161", "http://l2:4161", "l3:4161"}))
		require.Equal(t, time.Second, time.Since(start), "all are asked at once, and waited for")

		time.Sleep(10 * time.Minute)
		for addr := range lookupds.servers {
			var at []time.Duration
			for _, q := range lookupds.asked(addr) {
				at = append(at, q.At.Sub(start))
			}
			var want []time.Duration
			for i := range 11 {
				want = append(want, time.Duration(i)*time.Minute)
			}
			if len(at) < len(want) { // the eleventh comes at this very moment
				want = want[:10]
			}
			require.Equal(t, want, at, "%s: at the start once, and then each poll interval", addr)
		}
	})
}

func TestLookupRequest(t *testing.T) {
	tests := map[string]struct {
		tune func(cfg *Config)
		auth string
		addr string
		url  string
	}{
		"no secret": {addr: "l1:4161", url: "http://l1:4161/lookup?topic=t"},
		"secret": {
			tune: func(cfg *Config) { cfg.AuthSecret = "s3cret" },
			auth: "Bearer s3cret", addr: "http://l1:4161/x?dc=a", url: "http://l1:4161/x?dc=a&topic=t",
		},
		"secret kept back by the option": {
			tune: func(cfg *Config) {
				cfg.AuthSecret = "s3cret"
				if err := cfg.Set("skip_lookupd_authorization", true); err != nil {
					panic(err)
				}
			},
			addr: "l1:4161", url: "http://l1:4161/lookup?topic=t",
		},
		"secret sent by the option": {
			tune: func(cfg *Config) {
				cfg.AuthSecret = "s3cret"
				if err := cfg.Set("skip-lookupd-authorization", "false"); err != nil {
					panic(err)
				}
			},
			auth: "Bearer s3cret", addr: "l1:4161", url: "http://l1:4161/lookup?topic=t",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				lookupds := newFakeLookupds(t, "l1:4161")
				r := newDiscoveringConsumer(t, newFakeCluster(t), lookupds, tt.tune)
				require.NoError(t, r.ConnectToNSQLookupd(tt.addr))
				asked := lookupds.asked("")
				require.Len(t, asked, 1, "the first query is made before the call returns")
				require.Equal(t, tt.url, asked[0].URL)
				require.Equal(t, tt.auth, asked[0].Header.Get("Authorization"))
				require.Equal(t, "application/vnd.nsq; version=1.0", asked[0].Header.Get("Accept"))
			})
		})
	}
}

func TestOneGoodLookupdIsEnough(t *testing.T) {
	t.Parallel()
	dead := map[string]func(l *fakeLookupd){
		"refuses":             (*fakeLookupd).refused,
		"is a black hole":     (*fakeLookupd).hangs,
		"answers 500":         (*fakeLookupd).broken,
		"answers garbage":     (*fakeLookupd).garbage,
		"answers nothing":     (*fakeLookupd).empty,
		"answers for ever":    (*fakeLookupd).endless,
		"knows no such topic": (*fakeLookupd).notFound,
	}
	for name, break_ := range dead {
		t.Run("the first one "+name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				lookupds := newFakeLookupds(t, "dead:4161", "live:4161")
				break_(lookupds.at("dead:4161"))
				lookupds.at("live:4161").list("nsqd-1:4150")
				n := newFakeNSQD(t)
				n.publish("x")
				r := newDiscoveringConsumer(t, n.cluster, lookupds, nil)
				start := time.Now()
				require.NoError(t, r.ConnectToNSQLookupds([]string{"dead:4161", "live:4161"}))
				require.LessOrEqual(t, time.Since(start), 2*time.Second)
				m := n.cluster.waitEntry(byKind(entryMessage))
				require.Less(t, m.At.Sub(start), time.Second)
			})
		})
	}
}

func TestConnectToLookupdReturnsPromptly(t *testing.T) {
	tests := map[string]struct {
		arrange func(lookupds *fakeLookupds, n *fakeNSQD)
		tune    func(cfg *Config)
		within  time.Duration
	}{
		"lookupds are black holes": {
			arrange: func(l *fakeLookupds, n *fakeNSQD) { l.at("l1:4161").hangs(); l.at("l2:4161").hangs() },
			within:  2 * time.Second,
		},
		"nsqd is a black hole": {
			arrange: func(l *fakeLookupds, n *fakeNSQD) { n.setReach(reachHangs) },
			tune:    func(cfg *Config) { cfg.DialTimeout = time.Minute },
			within:  2 * time.Second,
		},
		"nsqd accepts and says nothing": {
			arrange: func(l *fakeLookupds, n *fakeNSQD) { n.setReach(reachSilent) },
			within:  2 * time.Second,
		},
		"lookupd hangs, and so would nsqd": {
			arrange: func(l *fakeLookupds, n *fakeNSQD) { l.at("l2:4161").hangs(); n.setReach(reachHangs) },
			within:  2 * time.Second,
		},
		"nsqd is down":  {arrange: func(l *fakeLookupds, n *fakeNSQD) { n.down() }},
		"all is well":   {arrange: func(l *fakeLookupds, n *fakeNSQD) {}},
		"lookupds fail": {arrange: func(l *fakeLookupds, n *fakeNSQD) { l.at("l1:4161").broken(); l.at("l2:4161").refused() }},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				lookupds := newFakeLookupds(t, "l1:4161", "l2:4161")
				lookupds.at("l1:4161").list("nsqd-1:4150")
				lookupds.at("l2:4161").list("nsqd-1:4150")
				n := newFakeNSQD(t)
				tt.arrange(lookupds, n)
				r := newDiscoveringConsumer(t, n.cluster, lookupds, tt.tune)
				start := time.Now()
				require.NoError(t, r.ConnectToNSQLookupds([]string{"l1:4161", "l2:4161"}))
				require.Equal(t, tt.within, time.Since(start))
				require.NoError(t, r.ConnectToNSQLookupd("l2:4161"), "a known address")
				require.NoError(t, r.ConnectToNSQLookupd("http://l2:4161/lookup"), "the same in other words")
				require.Equal(t, tt.within, time.Since(start))
				require.Len(t, lookupds.asked("l2:4161"), 1)
			})
		})
	}
}

func TestAnswersOfAllLookupdsAreMerged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161", "l2:4161", "l3:4161")
		cluster := newFakeCluster(t, "a:4150", "b:4150", "c:4150", "[::1]:4150")
		lookupds.at("l1:4161").list("a:4150", "b:4150")
		lookupds.at("l2:4161").oldEnvelope()
		lookupds.at("l2:4161").list("b:4150", "c:4150", "b:4150")
		lookupds.at("l3:4161").list("[::1]:4150")
		r := newDiscoveringConsumer(t, cluster, lookupds, nil)
		require.NoError(t, r.ConnectToNSQLookupds([]string{"l1:4161", "l2:4161", "l3:4161"}))
		require.Equal(t, []string{"[::1]:4150", "a:4150", "b:4150", "c:4150"}, nsqdsConnected(r))

		time.Sleep(10 * time.Minute)
		require.Len(t, cluster.snapshot(byKind(entryDialed)), 4, "the same answers lead to no more dials")
		s := r.Status()
		require.Equal(t, []string{"b:4150", "c:4150"}, s.NSQLookupds[1].NSQDs)
		for _, n := range s.NSQDs {
			require.True(t, n.Discovered)
		}
	})
}

func TestTopicThatComesLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161")
		n := newFakeNSQD(t)
		r := newDiscoveringConsumer(t, n.cluster, lookupds, nil)
		require.NoError(t, r.ConnectToNSQLookupd("l1:4161"))
		time.Sleep(90 * time.Second)
		require.Empty(t, n.dialTimes())
		require.NoError(t, r.Status().NSQLookupds[0].LastError)
		lookupds.at("l1:4161").list(n.addr)
		time.Sleep(time.Minute)
		require.Equal(t, []string{n.addr}, nsqdsConnected(r))
	})
}

// filterFunc is a DiscoveryFilter.
type filterFunc func([]string) []string

func (f filterFunc) Filter(addrs []string) []string { return f(addrs) }

func TestDiscoveryFilter(t *testing.T) {
	tests := map[string]struct {
		filter filterFunc
		want   []string
	}{
		"keeps one": {
			filter: func(addrs []string) []string {
				return slices.DeleteFunc(addrs, func(a string) bool { return a != "b:4150" })
			},
			want: []string{"b:4150"},
		},
		"keeps none": {filter: func([]string) []string { return nil }, want: []string{}},
		"maps to other addresses": {
			filter: func(addrs []string) []string {
				for i := range addrs {
					addrs[i] = "mapped-" + addrs[i]
				}
				return addrs
			},
			want: []string{"mapped-a:4150", "mapped-b:4150", "mapped-c:4150"},
		},
		"answers with what is no address": {
			filter: func(addrs []string) []string { return []string{"", "a", "a: 4150", "http://a:4150", "c:4150"} },
			want:   []string{"c:4150"},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				lookupds := newFakeLookupds(t, "l1:4161", "l2:4161")
				lookupds.at("l1:4161").list("a:4150", "b:4150")
				lookupds.at("l2:4161").list("b:4150", "c:4150")
				cluster := newFakeCluster(t, "a:4150", "b:4150", "c:4150", "mapped-a:4150", "mapped-b:4150", "mapped-c:4150")
				r := newDiscoveringConsumer(t, cluster, lookupds, nil)
				r.SetBehaviorDelegate(tt.filter)
				require.NoError(t, r.ConnectToNSQLookupds([]string{"l1:4161", "l2:4161"}))
				require.Equal(t, tt.want, nsqdsConnected(r))
				time.Sleep(10 * time.Minute)
				require.Equal(t, tt.want, nsqdsConnected(r))
				require.Len(t, cluster.snapshot(byKind(entryDialed)), len(tt.want))
			})
		})
	}
}

func TestDiscoveryFilterIsShownEachAddressOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161", "l2:4161")
		lookupds.at("l1:4161").list("a:4150", "b:4150")
		lookupds.at("l2:4161").list("b:4150", "a:4150")
		r := newDiscoveringConsumer(t, newFakeCluster(t, "a:4150", "b:4150"), lookupds, nil)
		r.SetBehaviorDelegate(filterFunc(func(addrs []string) []string {
			assert.ElementsMatch(t, []string{"a:4150", "b:4150"}, addrs)
			return addrs
		}))
		require.NoError(t, r.ConnectToNSQLookupds([]string{"l1:4161", "l2:4161"}))
		time.Sleep(10 * time.Minute)
		require.Equal(t, []string{"a:4150", "b:4150"}, nsqdsConnected(r))
	})
}

func TestDiscoveryFilterThatPanicsDropsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161")
		lookupds.at("l1:4161").list("nsqd-1:4150")
		n := newFakeNSQD(t)
		r := newDiscoveringConsumer(t, n.cluster, lookupds, nil)
		var broken atomic.Bool
		r.SetBehaviorDelegate(filterFunc(func(addrs []string) []string {
			if broken.Load() {
				panic("the filter is broken")
			}
			return addrs
		}))
		require.NoError(t, r.ConnectToNSQLookupd("l1:4161"))
		broken.Store(true)
		time.Sleep(time.Hour)
		require.Equal(t, []string{n.addr}, nsqdsConnected(r))
		require.Len(t, n.dialTimes(), 1)
	})
}

func TestStopDoesNotWaitForADiscoveryFilter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161")
		lookupds.at("l1:4161").list("nsqd-1:4150")
		r := newDiscoveringConsumer(t, newFakeNSQD(t).cluster, lookupds, nil)
		release := make(chan struct{})
		r.SetBehaviorDelegate(filterFunc(func(addrs []string) []string {
			<-release
			return addrs
		}))
		require.NoError(t, r.ConnectToNSQLookupd("l1:4161"))
		stopConsumer(t, r, 100*time.Millisecond)
		close(release)
	})
}

func TestSetBehaviorDelegatePanicsOnForeignTypes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestConsumer(t, newFakeCluster(t), nil)
		for _, foreign := range []any{nil, 1, func([]string) []string { return nil }} {
			require.PanicsWithValue(t, "behavior delegate does not have any recognized methods", func() { r.SetBehaviorDelegate(foreign) })
		}
		stopConsumer(t, r, time.Second)
	})
}

// vanishing is a consumer of two nsqds behind two nsqlookupds.
func vanishing(t *testing.T, tune func(cfg *Config)) (r *Consumer, lookupds *fakeLookupds, cluster *fakeCluster, start time.Time) {
	lookupds = newFakeLookupds(t, "l1:4161", "l2:4161")
	lookupds.at("l1:4161").list("a:4150", "b:4150")
	lookupds.at("l2:4161").list("a:4150", "b:4150")
	cluster = newFakeCluster(t, "a:4150", "b:4150")
	r = newDiscoveringConsumer(t, cluster, lookupds, tune)
	start = time.Now()
	require.NoError(t, r.ConnectToNSQLookupds([]string{"l1:4161", "l2:4161"}))
	require.Equal(t, []string{"a:4150", "b:4150"}, nsqdsConnected(r))
	return r, lookupds, cluster, start
}

func TestVanishedNSQDIsClosedAfterThreeGoodPolls(t *testing.T) {
	t.Parallel()
	type env struct {
		lookupds *fakeLookupds
		cluster  *fakeCluster
	}
	listBoth := func(e env) {
		e.lookupds.at("l1:4161").list("a:4150", "b:4150")
		e.lookupds.at("l2:4161").list("a:4150", "b:4150")
	}
	listA := func(e env) {
		e.lookupds.at("l1:4161").list("a:4150")
		e.lookupds.at("l2:4161").list("a:4150")
	}
	minutes := func(interval time.Duration) func(cfg *Config) {
		return func(cfg *Config) { cfg.LookupdPollInterval = interval }
	}
	tests := map[string]struct {
		tune   func(cfg *Config)
		before map[int]func(e env) // what happens right before a poll; poll 0 was the first
		closed time.Duration       // 0: never
	}{
		"by the poll interval": {
			before: map[int]func(e env){1: listA},
			closed: 3 * time.Minute,
		},
		"but not before the vanish timeout": {
			tune:   minutes(10 * time.Second),
			before: map[int]func(e env){1: listA},
			closed: 70 * time.Second,
		},
		"with a long vanish timeout": {
			tune:   func(cfg *Config) { cfg.VanishTimeout = 10 * time.Minute },
			before: map[int]func(e env){1: listA},
			closed: 11 * time.Minute,
		},
		"without a vanish timeout": {
			tune:   func(cfg *Config) { cfg.VanishTimeout, cfg.LookupdPollInterval = 0, time.Second },
			before: map[int]func(e env){1: listA},
			closed: 3 * time.Second,
		},
		"also if the topic is unknown now": {
			before: map[int]func(e env){1: func(e env) {
				e.lookupds.at("l1:4161").list("a:4150")
				e.lookupds.at("l2:4161").notFound()
			}},
			closed: 3 * time.Minute,
		},
		"a poll in which one fails does not count": {
			before: map[int]func(e env){1: listA, 2: func(e env) { e.lookupds.at("l2:4161").broken() }, 3: listA},
			closed: 4 * time.Minute,
		},
		"a poll in which one hangs does not count": {
			tune:   func(cfg *Config) { cfg.LookupdPollTimeout = 10 * time.Second },
			before: map[int]func(e env){1: listA, 2: func(e env) { e.lookupds.at("l2:4161").hangs() }, 3: listA},
			closed: 4 * time.Minute,
		},
		"never while one always fails": {
			before: map[int]func(e env){1: func(e env) { listA(e); e.lookupds.at("l2:4161").broken() }},
		},
		"never while one lists what can't be dialled": {
			before: map[int]func(e env){1: func(e env) {
				listA(e)
				e.lookupds.at("l2:4161").respondWith(200, `{"producers":[{"broadcast_address":"","tcp_port":4150}]}`)
			}},
		},
		"listed again in between": {
			before: map[int]func(e env){1: listA, 3: listBoth, 4: listA},
			closed: 6 * time.Minute,
		},
		"listed by one of the two": {
			before: map[int]func(e env){1: func(e env) { e.lookupds.at("l1:4161").list("a:4150") }},
		},
		"a message in between": {
			before: map[int]func(e env){1: listA, 3: func(e env) { e.cluster.nsqd("b:4150").publish("x") }},
			closed: 5 * time.Minute,
		},
		"messages again and again": {
			before: map[int]func(e env){1: func(e env) { listA(e); e.cluster.nsqd("b:4150").flood(50 * time.Second) }},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, lookupds, cluster, start := vanishing(t, tt.tune)
				interval := r.config.LookupdPollInterval
				until := 20 * time.Minute
				if tt.closed > 0 {
					until = 2 * tt.closed
				}
				for poll := 1; time.Since(start) < until; poll++ {
					time.Sleep(time.Until(start.Add(time.Duration(poll)*interval - interval/10)))
					if act := tt.before[poll]; act != nil {
						act(env{lookupds, cluster})
					}
				}
				closes := cluster.snapshot(byKind(entryClosed))
				if tt.closed == 0 {
					require.Empty(t, closes)
					require.Equal(t, []string{"a:4150", "b:4150"}, nsqdsConnected(r))
					return
				}
				require.Len(t, closes, 1)
				require.Equal(t, "b:4150", closes[0].NSQD)
				require.WithinDuration(t, start.Add(tt.closed), closes[0].At, 100*time.Millisecond)
				require.Contains(t, cluster.commands("b:4150"), "CLS", "gracefully")
				require.Len(t, cluster.snapshot(byKind(entryDialed)), 2)
				require.Len(t, r.Status().NSQDs, 1)
			})
		})
	}
}

func TestVanishedNSQDGetsTheAnswersOfRunningHandlers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161")
		lookupds.at("l1:4161").list("nsqd-1:4150")
		n := newFakeNSQD(t)
		n.set(func(b *fakeBehaviour) { b.msgTimeout = 15 * time.Minute })
		r := newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.LookupdPollJitter = 0 })
		r.SetLookupdHttpClient(lookupds.client())
		r.AddHandler(HandlerFunc(func(*Message) error {
			time.Sleep(10 * time.Minute)
			return nil
		}))
		defer stopConsumer(t, r, time.Minute)
		require.NoError(t, r.ConnectToNSQLookupd("l1:4161"))
		ids := n.publish("x")
		lookupds.at("l1:4161").list()
		time.Sleep(5 * time.Minute)
		require.Empty(t, r.Status().NSQDs)
		require.EqualValues(t, 1, r.Stats().MessagesReceived, "the sums don't shrink while it closes")
		require.Equal(t, 1, r.Status().InFlight)
		time.Sleep(6 * time.Minute)
		require.True(t, n.isFinished(ids[0]))
		require.Empty(t, n.stats().Conns)
		require.Equal(t, ConsumerStats{MessagesReceived: 1, MessagesFinished: 1}, *r.Stats())
	})
}

func TestLookupErrorsDropNothing(t *testing.T) {
	t.Parallel()
	trouble := map[string]func(l *fakeLookupd){
		"refused": (*fakeLookupd).refused,
		"hang":    (*fakeLookupd).hangs,
		"500":     (*fakeLookupd).broken,
		"garbage": (*fakeLookupd).garbage,
		"nothing": (*fakeLookupd).empty,
		"nsqds that can't be dialled": func(l *fakeLookupd) {
			l.respondWith(200, `{"producers":[{"broadcast_address":"","tcp_port":4150}]}`)
		},
	}
	for name, break_ := range trouble {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				lookupds := newFakeLookupds(t, "l1:4161", "l2:4161")
				lookupds.at("l1:4161").list("a:4150")
				lookupds.at("l2:4161").list("b:4150")
				cluster := newFakeCluster(t, "a:4150", "b:4150", "c:4150")
				r := newDiscoveringConsumer(t, cluster, lookupds, nil)
				require.NoError(t, r.ConnectToNSQLookupds([]string{"l1:4161", "l2:4161"}))

				break_(lookupds.at("l2:4161")) // the only one to know b
				time.Sleep(20 * time.Minute)
				require.Equal(t, []string{"a:4150", "b:4150"}, nsqdsConnected(r))
				lookupds.at("l1:4161").list("a:4150", "c:4150")
				time.Sleep(2 * time.Minute)
				require.Equal(t, []string{"a:4150", "b:4150", "c:4150"}, nsqdsConnected(r), "what the good one lists is added")

				break_(lookupds.at("l1:4161"))
				time.Sleep(20 * time.Minute)
				require.Equal(t, []string{"a:4150", "b:4150", "c:4150"}, nsqdsConnected(r))
				require.Len(t, cluster.snapshot(byKind(entryDialed)), 3)

				// The last good answer stands also for those that are lost meanwhile.
				cluster.nsqd("a:4150").down()
				time.Sleep(5 * time.Minute)
				require.Equal(t, []string{"b:4150", "c:4150"}, nsqdsConnected(r))
				cluster.nsqd("a:4150").up()
				time.Sleep(2 * r.config.MaxReconnectInterval)
				require.Equal(t, []string{"a:4150", "b:4150", "c:4150"}, nsqdsConnected(r))
			})
		})
	}
}

func TestLostNSQDIsReconnectedAfterAFreshLookup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, lookupds, cluster, _ := vanishing(t, nil)
		for range 10 {
			time.Sleep(10 * time.Second)
			dials := len(cluster.snapshot(byKind(entryDialed)))
			asked, lost := len(lookupds.asked("")), time.Now()
			cluster.nsqd("a:4150").dropAll()
			cluster.waitEntries(dials+1, byKind(entryDialed))
			require.LessOrEqual(t, time.Since(lost), time.Second)
			require.Greater(t, len(lookupds.asked("")), asked, "nsqlookupd was asked first")
			cluster.nsqd("a:4150").waitSubscribed()
		}
		time.Sleep(time.Second)
		require.Equal(t, []string{"a:4150", "b:4150"}, nsqdsConnected(r))
	})
}

func TestLostNSQDIsReconnectedWhileOneLookupdHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161", "l2:4161")
		lookupds.at("l1:4161").list("nsqd-1:4150")
		lookupds.at("l2:4161").hangs()
		n := newFakeNSQD(t)
		r := newDiscoveringConsumer(t, n.cluster, lookupds, nil)
		require.NoError(t, r.ConnectToNSQLookupds([]string{"l1:4161", "l2:4161"}))
		lost := time.Now() // the first poll still waits for the second nsqlookupd
		n.dropAll()
		n.cluster.waitEntries(2, byKind(entryDialed), byNSQD(n.addr))
		require.LessOrEqual(t, time.Since(lost), time.Second)
		require.Len(t, lookupds.asked("l1:4161"), 2)
		time.Sleep(4 * time.Minute)
		require.LessOrEqual(t, len(lookupds.asked("l1:4161")), 7, "no storm of polls")
		require.LessOrEqual(t, len(lookupds.asked("l2:4161")), 5)
		require.Len(t, n.dialTimes(), 2)
	})
}

func TestLostNSQDIsReconnectedWhileAllLookupdsHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, lookupds, cluster, _ := vanishing(t, nil)
		lookupds.at("l1:4161").hangs()
		lookupds.at("l2:4161").hangs()
		time.Sleep(80 * time.Second) // the poll at a minute waits for them, and for a minute
		for range 3 {
			lost := time.Now()
			cluster.nsqd("a:4150").dropAll()
			cluster.nsqd("a:4150").waitSubscribed()
			require.LessOrEqual(t, time.Since(lost), time.Second, "by the last good answer")
			time.Sleep(5 * time.Second)
		}
		require.Equal(t, []string{"a:4150", "b:4150"}, nsqdsConnected(r))
	})
}

func TestLostNSQDIsNotReconnectedFromMemory(t *testing.T) {
	change := map[string]func(l *fakeLookupds){
		"vanished": func(l *fakeLookupds) {
			l.at("l1:4161").list("b:4150")
			l.at("l2:4161").list("b:4150")
		},
		"topic deleted": func(l *fakeLookupds) {
			l.at("l1:4161").notFound()
			l.at("l2:4161").notFound()
		},
	}
	for name, act := range change {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, lookupds, cluster, _ := vanishing(t, nil)
				act(lookupds)
				cluster.nsqd("a:4150").dropAll()
				time.Sleep(10 * time.Minute)
				require.Len(t, cluster.nsqd("a:4150").dialTimes(), 1)
				for _, n := range r.Status().NSQDs {
					require.NotEqual(t, "a:4150", n.Address, "it is forgotten")
				}
				require.ErrorIs(t, r.DisconnectFromNSQD("a:4150"), ErrNotConnected)
			})
		})
	}
}

func TestTombstoneEndsTheTriesToReconnect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, lookupds, cluster, _ := vanishing(t, nil)
		a := cluster.nsqd("a:4150")
		a.down()
		time.Sleep(time.Minute)
		tries := len(a.dialTimes())
		require.Greater(t, tries, 4, "tried again while it is listed")
		lookupds.at("l1:4161").list("b:4150")
		lookupds.at("l2:4161").list("b:4150")
		synctest.Wait()
		tries = len(a.dialTimes())
		a.up()
		time.Sleep(time.Hour)
		require.Len(t, a.dialTimes(), tries)
		require.Equal(t, []string{"b:4150"}, nsqdsConnected(r))
		lookupds.at("l2:4161").list("a:4150")
		time.Sleep(61 * time.Second)
		require.Equal(t, []string{"a:4150", "b:4150"}, nsqdsConnected(r), "and when it comes back")
	})
}

func TestPollJitterKeepsConsumersApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cluster := newFakeCluster(t)
		start := time.Now()
		var all []*fakeLookupds
		for range 50 {
			own := newFakeLookupds(t, "l1:4161")
			r := newDiscoveringConsumer(t, cluster, own, func(cfg *Config) { cfg.LookupdPollJitter = 0.3 })
			require.NoError(t, r.ConnectToNSQLookupd("l1:4161"))
			all = append(all, own)
		}
		require.Equal(t, start, time.Now())
		time.Sleep(5 * time.Minute)
		var second []time.Duration
		for _, own := range all {
			gaps := fakeLookupGaps(own.asked(""))
			require.GreaterOrEqual(t, gaps[0], time.Minute)
			require.LessOrEqual(t, gaps[0], 78*time.Second)
			for _, gap := range gaps[1:] {
				require.Equal(t, time.Minute, gap, "later polls keep their distance")
			}
			second = append(second, gaps[0])
		}
		slices.Sort(second)
		require.Less(t, second[0], 66*time.Second)
		require.Greater(t, second[49], 72*time.Second)
	})
}

func TestLookupdThatHangsDoesNotSpinThePolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161", "l2:4161")
		lookupds.at("l1:4161").hangs()
		r := newDiscoveringConsumer(t, newFakeCluster(t), lookupds, func(cfg *Config) {
			cfg.LookupdPollInterval = time.Second
			cfg.LookupdPollTimeout = 0
		})
		require.NoError(t, r.ConnectToNSQLookupds([]string{"l1:4161", "l2:4161"}))
		time.Sleep(time.Minute)
		require.Len(t, lookupds.asked("l1:4161"), 1, "it still owes the first answer")
		n := len(lookupds.asked("l2:4161"))
		require.True(t, 50 <= n && n <= 61, "%d polls of the other one in a minute", n)
	})
}

func TestLookupdsMayBeAddedAndRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161", "l2:4161", "l3:4161")
		cluster := newFakeCluster(t, "a:4150", "b:4150", "c:4150")
		lookupds.at("l1:4161").list("a:4150")
		lookupds.at("l2:4161").list("b:4150")
		lookupds.at("l3:4161").list("c:4150")
		r := newDiscoveringConsumer(t, cluster, lookupds, nil)
		require.ErrorIs(t, r.DisconnectFromNSQLookupd("l1:4161"), ErrNotConnected)
		start := time.Now()
		require.NoError(t, r.ConnectToNSQLookupd("l1:4161"))
		time.Sleep(30 * time.Second)
		require.NoError(t, r.ConnectToNSQLookupd("l2:4161"))
		require.Equal(t, []string{"a:4150", "b:4150"}, nsqdsConnected(r))
		require.Len(t, lookupds.asked("l1:4161"), 1, "only the new one is asked")
		time.Sleep(time.Until(start.Add(61 * time.Second)))
		require.Len(t, lookupds.asked("l1:4161"), 2)
		require.Len(t, lookupds.asked("l2:4161"), 2, "and from then on both at the same time")

		for _, unknown := range []string{"l3:4161", "l1:4162", "", "::", "http://l1:4161/x"} {
			require.Same(t, ErrNotConnected, r.DisconnectFromNSQLookupd(unknown), unknown)
		}
		require.NoError(t, r.DisconnectFromNSQLookupd("http://l2:4161/lookup"), "the same in other words")
		require.Same(t, ErrNotConnected, r.DisconnectFromNSQLookupd("l2:4161"))
		require.EqualError(t, r.DisconnectFromNSQLookupd("l1:4161"),
			"cannot disconnect from only remaining nsqlookupd HTTP address l1:4161")
		time.Sleep(time.Minute)
		require.Equal(t, []string{"a:4150", "b:4150"}, nsqdsConnected(r), "not at once")
		time.Sleep(5 * time.Minute)
		require.Equal(t, []string{"a:4150"}, nsqdsConnected(r))
		require.Len(t, lookupds.asked("l2:4161"), 2)

		require.NoError(t, r.ConnectToNSQLookupd("l3:4161"))
		require.NoError(t, r.DisconnectFromNSQLookupd("l1:4161"), "no longer the only one")
		require.Equal(t, "l3:4161", r.Status().NSQLookupds[0].Address)
	})
}

func TestAnswerOfARemovedLookupdIsVoid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161", "l2:4161")
		lookupds.at("l2:4161").list("nsqd-1:4150")
		lookupds.at("l2:4161").slow(4 * time.Second)
		n := newFakeNSQD(t)
		r := newDiscoveringConsumer(t, n.cluster, lookupds, nil)
		require.NoError(t, r.ConnectToNSQLookupds([]string{"l1:4161", "l2:4161"}))
		require.NoError(t, r.DisconnectFromNSQLookupd("l2:4161"))
		time.Sleep(10 * time.Minute)
		require.Empty(t, n.dialTimes())
		require.Len(t, lookupds.asked("l1:4161"), 11)
	})
}

func TestNSQDOfARemovedLookupdIsNotSoughtForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161", "l2:4161")
		lookupds.at("l1:4161").list("nsqd-1:4150")
		lookupds.at("l2:4161").refused()
		n := newFakeNSQD(t)
		r := newDiscoveringConsumer(t, n.cluster, lookupds, nil)
		require.NoError(t, r.ConnectToNSQLookupds([]string{"l1:4161", "l2:4161"}))
		require.NoError(t, r.DisconnectFromNSQLookupd("l1:4161"))
		n.down()
		time.Sleep(10 * time.Minute)
		require.LessOrEqual(t, len(lookupds.asked("l2:4161")), 20)
	})
}

func TestDisconnectFromDiscoveredNSQD(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, cluster, start := vanishing(t, nil)
		require.NoError(t, r.DisconnectFromNSQD("a:4150"))
		require.Same(t, ErrNotConnected, r.DisconnectFromNSQD("a:4150"))
		time.Sleep(30 * time.Second)
		require.Equal(t, []string{"b:4150"}, nsqdsConnected(r))
		time.Sleep(time.Until(start.Add(61 * time.Second)))
		require.Equal(t, []string{"a:4150", "b:4150"}, nsqdsConnected(r), "the next poll brings it back")
		require.Len(t, cluster.nsqd("a:4150").dialTimes(), 2)
	})
}

func TestDirectAddressThatIsDiscoveredToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, lookupds, cluster, _ := vanishing(t, nil)
		require.Same(t, ErrAlreadyConnected, r.ConnectToNSQD("a:4150"))
		lookupds.at("l1:4161").list()
		lookupds.at("l2:4161").list()
		time.Sleep(30 * time.Minute)
		require.Equal(t, []string{"a:4150"}, nsqdsConnected(r), "what was asked for directly does not vanish")
		cluster.nsqd("a:4150").dropAll()
		time.Sleep(time.Second)
		require.Equal(t, []string{"a:4150"}, nsqdsConnected(r), "and is reconnected without a lookup")
	})
}

func TestManyAnswersLeaveNothingBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161")
		var addrs []string
		for i := range 20 {
			addrs = append(addrs, fmt.Sprintf("n%d:4150", i))
		}
		cluster := newFakeCluster(t, addrs...)
		r := newDiscoveringConsumer(t, cluster, lookupds, func(cfg *Config) { cfg.LookupdPollInterval = 20 * time.Second })
		require.NoError(t, r.ConnectToNSQLookupd("l1:4161"))
		for i := range 60 {
			lookupds.at("l1:4161").list(addrs[i%20], fmt.Sprintf("gone-%d:4150", i))
			time.Sleep(20 * time.Second)
		}
		time.Sleep(time.Second)
		rows := r.Status().NSQDs
		require.LessOrEqual(t, len(rows), 8, "%v", rows)
		require.Len(t, nsqdsConnected(r), cluster.openConns())
	})
}

func TestStopBreaksOffLookups(t *testing.T) {
	arrange := map[string]func(l *fakeLookupd){
		"that hang":               (*fakeLookupd).hangs,
		"whose next is far ahead": func(l *fakeLookupd) { l.list("nsqd-1:4150") },
		"that fail":               (*fakeLookupd).refused,
	}
	for name, act := range arrange {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				lookupds := newFakeLookupds(t, "l1:4161")
				act(lookupds.at("l1:4161"))
				n := newFakeNSQD(t)
				n.setReach(reachHangs)
				r := newDiscoveringConsumer(t, n.cluster, lookupds, func(cfg *Config) {
					cfg.LookupdPollInterval, cfg.LookupdPollJitter, cfg.DialTimeout = 5*time.Minute, 1, 0
				})
				returned := make(chan error)
				go func() { returned <- r.ConnectToNSQLookupd("l1:4161") }()
				time.Sleep(time.Second)
				stopConsumer(t, r, 99*time.Millisecond)
				require.NoError(t, <-returned)
				asked := len(lookupds.asked(""))
				time.Sleep(time.Hour)
				require.Len(t, lookupds.asked(""), asked)
				require.Equal(t, errConsumerStopped, r.ConnectToNSQLookupd("l1:4161"))
			})
		})
	}
}

// ---- a real web server

func TestDiscoveryOverRealHTTP(t *testing.T) {
	checkNoLeaks(t)
	n := listenFake(t)
	host, port := n.addr[:len("127.0.0.1")], n.addr[len("127.0.0.1:"):]
	var mu sync.Mutex
	var auth []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		mu.Lock()
		auth = append(auth, req.Header.Get("Authorization"))
		mu.Unlock()
		assert.Equal(t, "t", req.URL.Query().Get("topic"))
		w.Header().Set("X-NSQ-Content-Type", "nsq; version=1.0")
		_, err := io.WriteString(w, `{"channels":[],"producers":[{"remote_address":"192.0.2.1:1","hostname":"elsewhere","broadcast_address":"`+
			host+`","tcp_port":`+port+`,"http_port":1,"version":"1.3.0"}]}`)
		assert.NoError(t, err)
	}))
	defer server.Close()
	cfg := NewConfig()
	cfg.AuthSecret = "s3cret"
	r, err := NewConsumer("t", "c", cfg)
	require.NoError(t, err)
	r.SetLogger(nil, LogLevelInfo)
	got := make(chan string, 1)
	r.AddHandler(HandlerFunc(func(m *Message) error {
		got <- string(m.Body)
		return nil
	}))
	n.publish("over HTTP")
	require.NoError(t, r.ConnectToNSQLookupds([]string{server.URL}))
	require.Equal(t, []string{n.addr}, nsqdsConnected(r))
	require.Equal(t, "over HTTP", <-got)
	mu.Lock()
	require.Equal(t, []string{"Bearer s3cret"}, auth)
	mu.Unlock()
	stopConsumer(t, r, 10*time.Second)
}

func TestLookupdAddressOfAnNSQD(t *testing.T) {
	checkNoLeaks(t)
	n := listenFake(t)
	r, err := NewConsumer("t", "c", NewConfig())
	require.NoError(t, err)
	r.SetLogger(nil, LogLevelInfo)
	r.AddHandler(HandlerFunc(func(*Message) error { return nil }))
	require.NoError(t, r.ConnectToNSQLookupd(n.addr))
	row := r.Status().NSQLookupds[0]
	require.Equal(t, 1, row.Failures)
	require.True(t, errors.Is(row.LastError, ErrNotLookupd), "%v", row.LastError)
	stopConsumer(t, r, 10*time.Second)
}
