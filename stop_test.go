package nsq

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// idleStop is how long stopping may take when nothing is in flight.
const idleStop = 100*time.Millisecond - time.Nanosecond

func finishAll(*Message) error { return nil }

// Promise 17: Stop is welcome at any time, and quick when nothing is in flight.
func TestStopAtAnyTime(t *testing.T) {
	inBackground := func(r *Consumer, addr string) <-chan error {
		result := make(chan error, 1)
		go func() { result <- r.ConnectToNSQD(addr) }()
		time.Sleep(100 * time.Millisecond)
		return result
	}
	for name, test := range map[string]struct {
		behave func(n *fakeNSQD)
		tune   func(cfg *Config)
		// before brings the consumer to where it is stopped. The channel, if not nil, tells how a connect under way ends.
		before func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error
	}{
		"before connecting": {},
		"connected and idle": {before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error {
			require.NoError(t, r.ConnectToNSQD(n.addr))
			time.Sleep(time.Second)
			return nil
		}},
		"at once after connecting": {before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error {
			require.NoError(t, r.ConnectToNSQD(n.addr))
			return nil
		}},
		"in a dial": {
			behave: func(n *fakeNSQD) { n.setReach(reachHangs) },
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error { return inBackground(r, n.addr) },
		},
		"in a dial that ignores its context": {
			tune: func(cfg *Config) {
				cfg.DialTimeout = 0
				cfg.Dial = func(context.Context, string, string) (net.Conn, error) {
					time.Sleep(time.Hour)
					return nil, errors.New("too late")
				}
			},
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error { return inBackground(r, n.addr) },
		},
		"with a silent peer": {
			behave: func(n *fakeNSQD) { n.setReach(reachSilent) },
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error { return inBackground(r, n.addr) },
		},
		"in IDENTIFY": {
			behave: func(n *fakeNSQD) { n.at("IDENTIFY", fakeStep{never: true}) },
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error { return inBackground(r, n.addr) },
		},
		"in TLS": {
			behave: func(n *fakeNSQD) {
				n.set(func(b *fakeBehaviour) { b.tls = true })
				n.at("TLS", fakeStep{never: true})
			},
			tune:   func(cfg *Config) { cfg.TlsV1 = true },
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error { return inBackground(r, n.addr) },
		},
		"in AUTH": {
			behave: func(n *fakeNSQD) {
				n.set(func(b *fakeBehaviour) { b.authSecret = "s3cret" })
				n.at("AUTH", fakeStep{never: true})
			},
			tune:   func(cfg *Config) { cfg.AuthSecret = "s3cret" },
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error { return inBackground(r, n.addr) },
		},
		"in SUB": {
			behave: func(n *fakeNSQD) { n.at("SUB", fakeStep{never: true}) },
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error { return inBackground(r, n.addr) },
		},
		"waiting to reconnect": {
			tune: func(cfg *Config) {
				cfg.ReconnectInterval, cfg.MaxReconnectInterval = 5*time.Minute, 5*time.Minute
			},
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error {
				require.NoError(t, r.ConnectToNSQD(n.addr))
				n.down()
				synctest.Wait()
				return nil
			},
		},
		"reconnecting": {
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error {
				require.NoError(t, r.ConnectToNSQD(n.addr))
				n.setReach(reachHangs)
				n.dropAll()
				time.Sleep(700 * time.Millisecond)
				require.Greater(t, len(n.dialTimes()), 1)
				return nil
			},
		},
		"in backoff": {
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error {
				require.NoError(t, r.ConnectToNSQD(n.addr))
				n.publish("fail")
				synctest.Wait()
				require.Equal(t, 1, r.Status().BackoffLevel)
				return nil
			},
		},
		"paused": {
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error {
				require.NoError(t, r.ConnectToNSQD(n.addr))
				r.ChangeMaxInFlight(0)
				return nil
			},
		},
		"with an nsqd that never answers CLS": {
			behave: func(n *fakeNSQD) { n.at("CLS", fakeStep{never: true}) },
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error {
				require.NoError(t, r.ConnectToNSQD(n.addr))
				return nil
			},
		},
		"with an nsqd that refuses CLS": {
			behave: func(n *fakeNSQD) { n.at("CLS", fakeStep{err: "E_INVALID cannot CLS in current state"}) },
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error {
				require.NoError(t, r.ConnectToNSQD(n.addr))
				return nil
			},
		},
		"with an nsqd that stopped reading": {
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error {
				require.NoError(t, r.ConnectToNSQD(n.addr))
				time.Sleep(time.Second)
				n.stopReading()
				return nil
			},
		},
		"with an nsqd that takes not a byte": {
			behave: func(n *fakeNSQD) { n.set(func(b *fakeBehaviour) { b.socketBuffer = 0 }) },
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error {
				require.NoError(t, r.ConnectToNSQD(n.addr))
				time.Sleep(time.Second)
				n.stopReading()
				return nil
			},
		},
		"with an nsqd that fell silent": {
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error {
				require.NoError(t, r.ConnectToNSQD(n.addr))
				n.set(func(b *fakeBehaviour) { b.silent = true })
				return nil
			},
		},
		"with a connection that was just lost": {
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error {
				require.NoError(t, r.ConnectToNSQD(n.addr))
				n.down()
				return nil
			},
		},
		"just disconnected": {
			before: func(t *testing.T, n *fakeNSQD, r *Consumer) <-chan error {
				require.NoError(t, r.ConnectToNSQD(n.addr))
				require.NoError(t, r.DisconnectFromNSQD(n.addr))
				return nil
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				if test.behave != nil {
					test.behave(n)
				}
				r := newTestConsumer(t, n.cluster, test.tune)
				r.AddConcurrentHandlers(HandlerFunc(func(m *Message) error {
					if string(m.Body) == "fail" {
						return errors.New("no good")
					}
					return nil
				}), 3)
				var connecting <-chan error
				if test.before != nil {
					connecting = test.before(t, n, r)
				}
				begin := time.Now()
				for range 3 {
					go r.Stop()
				}
				stopConsumer(t, r, idleStop)
				if connecting != nil {
					require.EqualError(t, <-connecting, "consumer stopped")
					require.Less(t, time.Since(begin), idleStop)
				}
				r.Stop()
				require.NoError(t, r.Shutdown(context.Background()))
				require.EqualError(t, r.ConnectToNSQD(n.addr), "consumer stopped")
				r.ChangeMaxInFlight(5)
				require.Equal(t, 0, r.Stats().Connections)
				require.True(t, r.Status().Stopping)
				dials := len(n.dialTimes())
				n.up()
				n.startReading()
				time.Sleep(2 * time.Hour)
				require.Len(t, n.dialTimes(), dials, "it never dials again")
				require.Zero(t, n.cluster.openConns())
				require.LessOrEqual(t, len(n.cluster.snapshot(byLine("CLS"))), 1)
			})
		})
	}
}

func TestStopWithoutHandlersClosesStopChan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newTestConsumer(t, newFakeCluster(t), nil)
		stopConsumer(t, r, idleStop)
		_, open := <-r.StopChan
		require.False(t, open)
	})
}

// Promise 17, the wire: CLS once, running handlers finish, what no handler has begun is given back at once.
func TestStopOnTheWire(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		var runs atomic.Int32
		r := consumeFrom(t, n, 2, HandlerFunc(func(m *Message) error {
			runs.Add(1)
			time.Sleep(20 * time.Second)
			return nil
		}), nil)
		ids := n.publishN(5)
		time.Sleep(5 * time.Second)
		n.set(func(b *fakeBehaviour) { b.paused = true })
		begin := time.Now()
		r.Stop()
		synctest.Wait()
		require.Equal(t, begin, time.Now())
		lines := n.commands("IDENTIFY", "SUB", "RDY")
		require.Equal(t, "CLS", lines[0])
		slices.Sort(lines[1:])
		require.Equal(t, []string{"CLS", "REQ " + ids[2] + " 0", "REQ " + ids[3] + " 0", "REQ " + ids[4] + " 0"}, lines)
		require.False(t, isClosed(r.force.Done()))

		<-r.StopChan
		took := time.Since(begin)
		require.GreaterOrEqual(t, took, 15*time.Second, "running handlers are waited for")
		require.Less(t, took, 15*time.Second+2*time.Second)
		lines = n.commands("IDENTIFY", "SUB", "RDY")[4:]
		slices.Sort(lines)
		require.Equal(t, []string{"FIN " + ids[0], "FIN " + ids[1]}, lines)
		require.EqualValues(t, 2, runs.Load())
		require.Zero(t, n.stats().Failed)
		require.Zero(t, n.stats().InFlight)
		require.NoError(t, r.Shutdown(context.Background()))
		closed := n.cluster.waitEntry(byKind(entryClosed))
		require.Equal(t, "client closed", closed.Line, "not a reset: the last FINs would be lost")
	})
}

// No handler begins a message behind Stop.
func TestNothingBeginsBehindStop(t *testing.T) {
	for name, stop := range map[string]func(r *Consumer){
		"Stop":     (*Consumer).Stop,
		"Shutdown": func(r *Consumer) { go r.Shutdown(context.Background()) },
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				var r *Consumer
				var runs, late atomic.Int32
				var stopped atomic.Bool
				r = newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.MaxInFlight = 100 })
				r.AddConcurrentHandlers(HandlerFunc(func(*Message) error {
					if stopped.Load() {
						late.Add(1)
					}
					if runs.Add(1) == 20 {
						stop(r)
						if name == "Shutdown" {
							time.Sleep(time.Nanosecond) // until it has begun
						}
						stopped.Store(true)
					}
					return nil
				}), 1)
				require.NoError(t, r.ConnectToNSQD(n.addr))
				n.publishN(100)
				<-r.StopChan
				synctest.Wait()
				require.Zero(t, late.Load())
				require.EqualValues(t, 20, runs.Load())
				require.Equal(t, 20, n.stats().Finished)
				require.Equal(t, 80, n.stats().Depth)
				require.Zero(t, n.stats().InFlight)
			})
		})
	}
}

// Messages that nsqd still sends behind CLS, and behind CLOSE_WAIT, are given back.
func TestStopGivesStragglersBack(t *testing.T) {
	for name, behave := range map[string]func(n *fakeNSQD){
		"behind CLOSE_WAIT": func(n *fakeNSQD) {
			n.set(func(b *fakeBehaviour) { b.stragglers = 2 })
		},
		"behind CLS, from an nsqd that reads late": func(n *fakeNSQD) {
			n.set(func(b *fakeBehaviour) { b.readDelay = 20 * time.Millisecond })
			n.publishN(3)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				r := consumeFrom(t, n, 1, HandlerFunc(finishAll), func(cfg *Config) { cfg.MaxInFlight = 2 })
				n.set(func(b *fakeBehaviour) { b.paused = true })
				n.publishN(3)
				behave(n)
				begin := time.Now()
				r.Stop()
				n.set(func(b *fakeBehaviour) { b.paused = false })
				<-r.StopChan
				require.LessOrEqual(t, time.Since(begin), idleStop)
				synctest.Wait()
				stats := n.stats()
				require.Zero(t, stats.InFlight)
				require.Positive(t, stats.Requeued, "there were stragglers")
				require.Equal(t, stats.Published, stats.Finished+stats.Depth)
				require.Len(t, n.cluster.snapshot(byLine("CLS")), 1)
			})
		})
	}
}

// Promise 17 on a busy topic: whenever it stops, nothing is in flight and nothing is lost.
func TestStopOnABusyTopicLeavesNothingInFlight(t *testing.T) {
	t.Parallel()
	for name, layers := range map[string]bool{"in clear": false, "through TLS and deflate": true} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				rng := rand.New(rand.NewPCG(5, 6))
				n.set(func(b *fakeBehaviour) {
					b.tls, b.deflate = layers, layers
					b.stragglers = 2
					b.readDelay = 3 * time.Millisecond
				})
				n.flood(100 * time.Microsecond)
				finished := atomic.Int64{}
				rounds := fewer(8)
				for round := range rounds {
					r := newTestConsumer(t, n.cluster, func(cfg *Config) {
						cfg.MaxInFlight = 1 + rng.IntN(50)
						cfg.TlsV1, cfg.Deflate = layers, layers
						cfg.TlsConfig = &tls.Config{RootCAs: fakeCert().pool}
						cfg.MaxAttempts = 0
					})
					var log syncedLines
					r.SetLogger(&log, LogLevelWarning)
					pause := time.Duration(rng.IntN(3000)) * time.Microsecond
					r.AddConcurrentHandlers(HandlerFunc(func(*Message) error {
						time.Sleep(pause)
						finished.Add(1)
						return nil
					}), 1+rng.IntN(8))
					require.NoError(t, r.ConnectToNSQD(n.addr))
					time.Sleep(time.Duration(rng.IntN(100_000)) * time.Microsecond)
					stopConsumer(t, r, 3*time.Second)
					time.Sleep(10 * time.Millisecond) // until nsqd has read all
					synctest.Wait()
					stats := n.stats()
					require.Zero(t, stats.InFlight, round)
					require.Zero(t, stats.Failed, round)
					require.Equal(t, stats.Published, stats.Finished+stats.Depth, round)
					require.EqualValues(t, finished.Load(), stats.Finished, round)
					require.Zero(t, n.cluster.openConns())
					for _, complaint := range []string{"ERR", "IO error", "left alive", "too late", "ran out of time"} {
						require.NotContains(t, log.text(), complaint, "no complaints in normal life")
					}
				}
				n.stopFlood()
				require.Equal(t, rounds, len(n.cluster.snapshot(byLine("CLS"))), "CLS once for each")
			})
		})
	}
}

// A clean stop is no reason for a warning.
func TestCleanStopIsQuiet(t *testing.T) {
	for name, secure := range map[string]bool{"in clear": false, "TLS": true} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				var log syncedLines
				n.set(func(b *fakeBehaviour) { b.tls = secure })
				r := newTestConsumer(t, n.cluster, func(cfg *Config) {
					cfg.TlsV1, cfg.TlsConfig = secure, &tls.Config{RootCAs: fakeCert().pool}
				})
				r.SetLogger(&log, LogLevelInfo)
				r.AddHandler(HandlerFunc(finishAll))
				require.NoError(t, r.ConnectToNSQD(n.addr))
				n.publishN(3)
				synctest.Wait()
				stopConsumer(t, r, idleStop)
				require.NotContains(t, log.text(), "WRN")
				require.NotContains(t, log.text(), "ERR")
				for _, line := range []string{"stopping...", "beginning close", "received CLOSE_WAIT from nsqd", "clean close complete", "stopping handlers", "rdyLoop exiting"} {
					require.Contains(t, log.text(), line)
				}
			})
		})
	}
}

// Promise 17: what takes longer than ShutdownTimeout is broken off.
func TestStopWithAStuckHandler(t *testing.T) {
	for name, test := range map[string]struct {
		timeout time.Duration
		lose    bool // the connection while the handler is stuck
	}{
		"after the timeout":                     {timeout: 5 * time.Second},
		"without any patience":                  {timeout: 0},
		"whose connection is gone":              {timeout: 5 * time.Second, lose: true},
		"whose connection is gone, no patience": {timeout: 0, lose: true},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				var log syncedLines
				release := make(chan struct{})
				var returned atomic.Bool
				r := newTestConsumer(t, n.cluster, func(cfg *Config) {
					cfg.ShutdownTimeout = test.timeout
					cfg.MaxInFlight = 3
				})
				r.SetLogger(&log, LogLevelWarning)
				r.AddHandler(HandlerFunc(func(*Message) error {
					<-release
					returned.Store(true)
					return nil
				}))
				require.NoError(t, r.ConnectToNSQD(n.addr))
				id := n.publishN(1)[0]
				synctest.Wait()
				if test.lose {
					n.down()
				}
				begin := time.Now()
				r.Stop()
				<-r.StopChan
				require.Equal(t, test.timeout, time.Since(begin))
				synctest.Wait()
				require.Zero(t, n.cluster.openConns())
				require.Equal(t, 1, r.Status().Running)
				require.Contains(t, log.text(), "1 handler running")

				err := r.Shutdown(context.Background())
				var serr *ShutdownError
				require.ErrorAs(t, err, &serr)
				require.Equal(t, 1, serr.HandlersRunning)
				require.NoError(t, serr.Err)
				if !test.lose {
					require.Equal(t, 1, serr.Unanswered)
				}
				close(release)
				synctest.Wait()
				require.True(t, returned.Load())
				require.Empty(t, answersTo(n), "an answer that is too late is a no-op")
				require.False(t, n.isFinished(id))
			})
		})
	}
}

// Messages that were left to the handler's code are waited for like running ones.
func TestStopWaitsForMessagesWithoutAutoResponse(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		held := make(heldMessages, 2)
		r := consumeFrom(t, n, 2, held, nil)
		ids := n.publishN(2)
		one, two := held.next(t), held.next(t)
		r.Stop()
		time.Sleep(10 * time.Second)
		require.False(t, isFakeClosed(asStruct(r.StopChan)))
		one.Finish()
		time.Sleep(10 * time.Second)
		two.Touch()
		two.Requeue(time.Second)
		<-r.StopChan
		require.Contains(t, answersTo(n), "TOUCH "+string(two.ID[:]))
		require.Contains(t, answersTo(n), "REQ "+string(two.ID[:])+" 1000")
		require.Equal(t, 1, n.stats().Finished)
		require.Len(t, ids, 2)
		require.NoError(t, r.Shutdown(context.Background()))
	})
}

// asStruct makes a channel of a StopChan that closes with it.
func asStruct(stop chan int) <-chan struct{} {
	done := make(chan struct{})
	select {
	case <-stop:
		close(done)
	default:
	}
	return done
}

func TestShutdown(t *testing.T) {
	errMine := errors.New("my own reason")
	for name, test := range map[string]struct {
		ctx     func() (context.Context, context.CancelFunc)
		handler time.Duration // how long it takes
		took    time.Duration
		want    error // behind the *ShutdownError; nil: a clean shutdown
	}{
		"in time": {
			ctx: func() (context.Context, context.CancelFunc) {
				return context.WithTimeout(context.Background(), time.Hour)
			},
			handler: 50 * time.Minute, // ShutdownTimeout is 30 s, but this is the caller's deadline
			took:    50 * time.Minute,
		},
		"past the deadline": {
			ctx: func() (context.Context, context.CancelFunc) {
				return context.WithTimeout(context.Background(), 3*time.Second)
			},
			handler: time.Hour, took: 3 * time.Second, want: context.DeadlineExceeded,
		},
		"cancelled": {
			ctx: func() (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancel(context.Background())
				time.AfterFunc(2*time.Second, cancel)
				return ctx, cancel
			},
			handler: time.Hour, took: 2 * time.Second, want: context.Canceled,
		},
		"cancelled for a reason": {
			ctx: func() (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancelCause(context.Background())
				time.AfterFunc(2*time.Second, func() { cancel(errMine) })
				return ctx, func() { cancel(nil) }
			},
			handler: time.Hour, took: 2 * time.Second, want: errMine,
		},
		"with a context that has ended": {
			ctx: func() (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancel(context.Background())
				cancel()
				return ctx, cancel
			},
			handler: time.Hour, want: context.Canceled,
		},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				n.set(func(b *fakeBehaviour) { b.msgTimeout, b.maxMsgTimeout = 2*time.Hour, 2*time.Hour })
				r := newTestConsumer(t, n.cluster, nil)
				r.AddHandler(HandlerFunc(func(*Message) error {
					time.Sleep(test.handler)
					return nil
				}))
				require.NoError(t, r.ConnectToNSQD(n.addr))
				n.publishN(1)
				synctest.Wait()
				ctx, cancel := test.ctx()
				defer cancel()
				begin := time.Now()
				err := r.Shutdown(ctx)
				require.Less(t, time.Since(begin)-test.took, 2*time.Second)
				require.GreaterOrEqual(t, time.Since(begin), test.took)
				require.True(t, isFakeClosed(asStruct(r.StopChan)))
				synctest.Wait()
				require.Zero(t, n.cluster.openConns())
				require.Equal(t, err, r.Shutdown(context.Background()), "told again")
				if test.want == nil {
					require.NoError(t, err)
					require.Equal(t, 1, n.stats().Finished)
					return
				}
				var serr *ShutdownError
				require.ErrorAs(t, err, &serr)
				require.Equal(t, &ShutdownError{HandlersRunning: 1, Unanswered: 1, Err: test.want}, serr)
				require.ErrorIs(t, err, test.want)
				require.Contains(t, err.Error(), "1 handler running and 1 message unanswered")
				time.Sleep(2 * time.Hour) // the handler ends
			})
		})
	}
}

// Only handlers that have a message are running: not those that have just begun to wait for one.
func TestShutdownInAHurryCountsNoIdleHandlers(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for range 10 {
			r := newTestConsumer(t, n.cluster, nil)
			r.AddConcurrentHandlers(HandlerFunc(finishAll), 2000)
			require.NoError(t, r.ConnectToNSQD(n.addr))
			require.NoError(t, r.Shutdown(ctx))
		}
	})
}

// A Shutdown behind a Stop brings its deadline with it.
func TestShutdownHastensStop(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		release := make(chan struct{})
		r := consumeFrom(t, n, 1, HandlerFunc(func(*Message) error { <-release; return nil }), nil)
		n.publishN(1)
		synctest.Wait()
		begin := time.Now()
		r.Stop()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		var serr *ShutdownError
		require.ErrorAs(t, r.Shutdown(ctx), &serr)
		require.Equal(t, time.Second, time.Since(begin))
		require.ErrorIs(t, serr, context.DeadlineExceeded)
		close(release)
	})
}

func TestStopFromAHandler(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		r := newTestConsumer(t, n.cluster, nil)
		r.AddHandler(HandlerFunc(func(*Message) error { r.Stop(); return nil }))
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.publishN(2)
		select {
		case <-r.StopChan:
		case <-time.After(3 * time.Second):
			require.Fail(t, "it does not stop")
		}
		require.Equal(t, 1, n.stats().Finished)
		require.Zero(t, n.stats().InFlight)
	})
}

// A connection that comes about while Stop begins must not be overlooked.
func TestStopMeetsAConnectThatSucceeds(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.at("SUB", fakeStep{delay: time.Second})
		r := newTestConsumer(t, n.cluster, nil)
		r.AddHandler(HandlerFunc(finishAll))
		r.SetLogger(slowLines{"stopping...", 5 * time.Second}, LogLevelInfo)
		result := make(chan error, 1)
		go func() { result <- r.ConnectToNSQD(n.addr) }()
		time.Sleep(time.Second / 2)
		go r.Stop()
		select {
		case <-r.StopChan:
		case <-time.After(10 * time.Second):
			require.Fail(t, "it does not stop")
		}
		require.EqualError(t, <-result, "consumer stopped")
		require.Zero(t, n.cluster.openConns())
	})
}

// slowLines is a logger that takes its time over some lines.
type slowLines struct {
	line string
	wait time.Duration
}

func (l slowLines) Output(_ int, s string) error {
	if strings.Contains(s, l.line) {
		time.Sleep(l.wait)
	}
	return nil
}

func TestStopManyConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var addrs []string
		for i := range 30 {
			addrs = append(addrs, fmt.Sprintf("nsqd-%d:4150", i+1))
		}
		cluster := newFakeCluster(t, addrs...)
		for i, addr := range addrs {
			if i%5 == 0 {
				cluster.nsqd(addr).at("CLS", fakeStep{never: true})
			}
		}
		r := newTestConsumer(t, cluster, func(cfg *Config) { cfg.MaxInFlight = 60 })
		r.AddHandler(HandlerFunc(finishAll))
		require.NoError(t, r.ConnectToNSQDs(addrs))
		synctest.Wait()
		require.Equal(t, 30, cluster.openConns())
		stopConsumer(t, r, idleStop)
		synctest.Wait()
		require.Zero(t, cluster.openConns())
		require.Len(t, cluster.snapshot(byLine("CLS")), 30)
	})
}

// The connection dies while it is being closed.
func TestConnectionLostWhileStopping(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		release := make(chan struct{})
		r := newTestConsumer(t, n.cluster, nil)
		r.AddHandler(HandlerFunc(func(*Message) error { <-release; return nil }))
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.publishN(1)
		synctest.Wait()
		r.Stop()
		time.Sleep(time.Second)
		n.dropAll()
		time.Sleep(time.Second)
		require.False(t, isFakeClosed(asStruct(r.StopChan)), "the handler still runs")
		close(release)
		synctest.Wait()
		require.True(t, isFakeClosed(asStruct(r.StopChan)))
		require.Len(t, n.dialTimes(), 1)
	})
}

// Promises 17 and 18: any public call at any time, with the network in trouble: no panic, no deadlock, nothing left.
func TestStopConcurrentlyWithEverything(t *testing.T) {
	t.Parallel()
	for seed := range uint64(12) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				addrs := []string{"nsqd-1:4150", "nsqd-2:4150", "nsqd-3:4150"}
				cluster := newFakeCluster(t, addrs...)
				for _, addr := range addrs {
					cluster.nsqd(addr).flood(time.Millisecond)
				}
				r := newTestConsumer(t, cluster, func(cfg *Config) {
					cfg.MaxInFlight = 20
					cfg.ReconnectInterval = 5 * time.Millisecond
					cfg.MaxReconnectInterval = 20 * time.Millisecond
					cfg.BackoffMultiplier = time.Millisecond
					cfg.DefaultRequeueDelay = time.Millisecond
				})
				r.AddConcurrentHandlers(HandlerFunc(func(m *Message) error {
					switch m.Body = nil; m.ID[15] % 8 {
					case 0:
						return errors.New("no good")
					case 1:
						m.Touch()
						time.Sleep(3 * time.Millisecond)
					case 2:
						panic("boom")
					}
					return nil
				}), 5)
				var busy sync.WaitGroup
				call := func(n uint64, do func(rng *rand.Rand)) {
					busy.Go(func() {
						rng := rand.New(rand.NewPCG(seed, n))
						for range 40 {
							time.Sleep(time.Duration(rng.IntN(5000)) * time.Microsecond)
							do(rng)
						}
					})
				}
				addr := func(rng *rand.Rand) string { return addrs[rng.IntN(len(addrs))] }
				call(1, func(rng *rand.Rand) { _ = r.ConnectToNSQD(addr(rng)) })
				call(2, func(rng *rand.Rand) { _ = r.ConnectToNSQDs(addrs) })
				call(3, func(rng *rand.Rand) { _ = r.DisconnectFromNSQD(addr(rng)) })
				call(4, func(rng *rand.Rand) { r.ChangeMaxInFlight(rng.IntN(40) - 2) })
				call(5, func(*rand.Rand) { r.Stats(); r.IsStarved(); r.Status() })
				call(6, func(*rand.Rand) { r.SetLogger(nil, LogLevelDebug); r.SetLoggerLevel(LogLevelError) })
				call(7, func(rng *rand.Rand) { cluster.nsqd(addr(rng)).dropAll() })
				call(8, func(rng *rand.Rand) {
					n := cluster.nsqd(addr(rng))
					n.setReach([]fakeReach{reachUp, reachUp, reachRefused, reachHangs, reachSilent}[rng.IntN(5)])
				})
				call(9, func(rng *rand.Rand) {
					if c := cluster.nsqd(addr(rng)).conn(); c != nil {
						[]func(){c.closeMidFrame, c.close, c.sendHeartbeat, func() { c.sendError("E_FIN_FAILED") }, func() { c.sendSize(-1) }}[rng.IntN(5)]()
					}
				})
				time.Sleep(time.Duration(rand.New(rand.NewPCG(seed, 0)).IntN(100)) * time.Millisecond)
				for range 3 {
					busy.Go(r.Stop)
				}
				busy.Go(func() { _ = r.Shutdown(context.Background()) })
				select {
				case <-r.StopChan:
				case <-time.After(10 * time.Second):
					require.Fail(t, "it does not stop")
				}
				require.Zero(t, r.Stats().Connections)
				busy.Wait()
				for _, addr := range addrs {
					cluster.nsqd(addr).stopFlood()
				}
				synctest.Wait()
				require.Zero(t, cluster.openConns())
				for _, addr := range addrs {
					for _, e := range cluster.snapshot(byNSQD(addr), byKind(entryError)) {
						require.Contains(t, e.Line, "E_FIN_FAILED", "nsqd was told nonsense")
					}
				}
			})
		})
	}
}

// Promise 18: over real sockets, nothing is left behind.
func TestNothingOutlivesStopChan(t *testing.T) {
	for name, trouble := range map[string]func(t *testing.T, n *fakeNSQD, r *Consumer){
		"a quiet life":      func(*testing.T, *fakeNSQD, *Consumer) {},
		"a lost connection": func(t *testing.T, n *fakeNSQD, r *Consumer) { n.dropAll() },
		"a refused SUB": func(t *testing.T, n *fakeNSQD, r *Consumer) {
			require.NoError(t, r.DisconnectFromNSQD(n.addr))
			n.set(func(b *fakeBehaviour) { b.refuseSubs = 1 })
			require.Error(t, r.ConnectToNSQD(n.addr))
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := listenFake(t)
			checkNoLeaks(t) // behind the fake: its own goroutines end later
			cfg := NewConfig()
			cfg.MaxInFlight = 10
			r, err := NewConsumer("t", "c", cfg)
			require.NoError(t, err)
			r.SetLogger(nil, LogLevelInfo)
			r.AddConcurrentHandlers(HandlerFunc(finishAll), 3)
			require.NoError(t, r.ConnectToNSQD(n.addr))
			n.publishN(20)
			n.cluster.waitUntil(func() bool { return n.stats().Finished == 20 })
			trouble(t, n, r)
			stopConsumer(t, r, 10*time.Second)
			n.cluster.waitUntil(func() bool { return n.cluster.openConns() == 0 })
		})
	}
}
