package nsq

import (
	"crypto/tls"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// stuckHandlers keep messages until release is closed: every other one without returning, the rest by DisableAutoResponse.
// From then on they finish what comes.
type stuckHandlers struct {
	release chan struct{}

	mu   sync.Mutex // guards held
	held []*Message
}

func (h *stuckHandlers) HandleMessage(m *Message) error {
	if m.ID[MsgIDLength-1]%2 == 1 || isClosed(h.release) {
		<-h.release
		return nil
	}
	m.DisableAutoResponse()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held = append(h.held, m)
	return nil
}

// answerAll answers what is held, from a goroutine each. It fails the test if time passes meanwhile.
func (h *stuckHandlers) answerAll(t *testing.T) {
	t.Helper()
	h.mu.Lock()
	held := h.held
	h.held = nil
	h.mu.Unlock()
	require.NotEmpty(t, held)
	start := time.Now()
	var answering sync.WaitGroup
	for i, m := range held {
		answering.Go(func() {
			m.Touch()
			switch i % 3 {
			case 0:
				m.Finish()
			case 1:
				m.Requeue(-1)
			case 2:
				m.RequeueWithoutBackoff(time.Second)
			}
		})
	}
	answering.Wait()
	synctest.Wait()
	require.Equal(t, start, time.Now(), "an answer waits for nobody")
}

func tlsForTest(cfg *Config) { cfg.TlsV1, cfg.TlsConfig = true, &tls.Config{RootCAs: fakeCert().pool} }

// A connection dies, in whatever way, while all handlers are stuck, and what they have fills the budget. It is noticed,
// and made again at once, with the whole budget; old answers go nowhere.
func TestConnectionDiesUnderStuckHandlers(t *testing.T) {
	t.Parallel()
	const beat = 5 * time.Second
	stopsReading := func(n *fakeNSQD) { n.stopReading() }
	tests := map[string]struct {
		die      func(n *fakeNSQD)
		messages int           // all that is in flight
		noticed  time.Duration // at most
		tune     func(cfg *Config)
	}{
		"a reset, with more in flight than any channel holds": {die: (*fakeNSQD).dropAll, messages: 1100},
		"nsqd hangs up":        {die: func(n *fakeNSQD) { n.conn().close() }, messages: 51},
		"nsqd's side ends":     {die: func(n *fakeNSQD) { n.conn().closeWrite() }, messages: 56},
		"the end in mid-frame": {die: func(n *fakeNSQD) { n.conn().closeMidFrame() }, messages: 50},
		"a fatal error":        {die: func(n *fakeNSQD) { n.conn().sendError("E_INVALID cannot do that") }, messages: 50},
		"nonsense":             {die: func(n *fakeNSQD) { n.conn().sendSize(-1) }, messages: 50},
		"silence":              {die: func(n *fakeNSQD) { n.set(func(b *fakeBehaviour) { b.silent = true }) }, messages: 50, noticed: 2 * beat},
		"nobody reads a NOP":   {die: stopsReading, messages: 50, noticed: beat + 10*time.Second},
		"nobody reads, in TLS": {die: stopsReading, messages: 50, noticed: beat + 10*time.Second, tune: tlsForTest},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				n.set(func(b *fakeBehaviour) {
					b.tls = tt.tune != nil
					if tt.noticed > 2*beat {
						b.socketBuffer = 0
					}
				})
				h := &stuckHandlers{release: make(chan struct{})}
				r := newTestConsumer(t, n.cluster, func(cfg *Config) {
					cfg.MaxInFlight, cfg.HeartbeatInterval, cfg.MaxAttempts = tt.messages, beat, 0
					if tt.tune != nil {
						tt.tune(cfg)
					}
				})
				r.AddConcurrentHandlers(h, 5)
				t.Cleanup(func() { stopConsumer(t, r, time.Minute) })
				require.NoError(t, r.ConnectToNSQD(n.addr))
				n.publishN(tt.messages)
				synctest.Wait()
				old := n.conn()
				require.Equal(t, tt.messages, old.unanswered())
				require.Equal(t, 5, r.Status().Running, "all are stuck")

				start := time.Now()
				tt.die(n)
				n.cluster.waitEntries(2, byKind(entryDialed))
				require.LessOrEqual(t, time.Since(start), tt.noticed+250*time.Millisecond)
				n.set(func(b *fakeBehaviour) { b.silent = false })
				n.startReading()
				fresh := n.waitSubscribed()
				synctest.Wait()
				require.Equal(t, []string{fmt.Sprint("RDY ", tt.messages)}, fresh.sent("IDENTIFY", "SUB"), "what is stuck reserves nothing any more")
				require.Equal(t, 5, r.Status().Running)

				h.answerAll(t)
				close(h.release)
				time.Sleep(time.Second)
				require.Empty(t, fresh.sent("IDENTIFY", "SUB", "RDY", "NOP"), "old answers go nowhere")
				old.drop()
				n.expire() // nsqd has noticed too, and the messages come again
				n.cluster.waitUntil(func() bool { return n.stats().Finished == tt.messages })
				require.Equal(t, []string{n.addr}, nsqdsConnected(r))
			})
		})
	}
}

// slowLogger is a handler that takes all its time over messages that are given up.
type slowLogger struct{ wait func() }

func (h slowLogger) HandleMessage(*Message) error { return nil }
func (h slowLogger) LogFailedMessage(*Message)    { h.wait() }

// Each heartbeat is answered when it comes, whatever handlers do and however long, while nsqd sends what it may.
func TestHeartbeatsAreAnsweredWhateverHandlersDo(t *testing.T) {
	t.Parallel()
	const beat, long = 10 * time.Second, 10 * time.Minute
	type life struct {
		r *Consumer
		n *fakeNSQD
	}
	wait := func() { time.Sleep(long) }
	tests := map[string]struct {
		handler Handler
		tune    func(cfg *Config)
		then    func(t *testing.T, l life) // once it is under way
		expired bool                       // messages' timeouts pass
	}{
		"a call that takes ten minutes": {
			handler: HandlerFunc(func(*Message) error { wait(); return nil }), expired: true,
		},
		"the message is finished first, then comes the work": {
			handler: HandlerFunc(func(m *Message) error { m.Finish(); wait(); return nil }), expired: true,
		},
		"the message is touched all the time": {
			handler: HandlerFunc(func(m *Message) error {
				for range long / time.Second {
					m.Touch()
					time.Sleep(time.Second)
				}
				return nil
			}), expired: true, // those behind it
		},
		"a message that is given up": {
			handler: slowLogger{wait}, expired: true,
			tune: func(cfg *Config) { cfg.MaxAttempts = 1 },
			then: func(t *testing.T, l life) { l.n.conn().sendMessage("00000000000000aa", 2, []byte("again")) },
		},
		"paused": {
			handler: HandlerFunc(func(*Message) error { wait(); return nil }), expired: true,
			then: func(t *testing.T, l life) { l.r.ChangeMaxInFlight(0) },
		},
		"in backoff": {
			handler: HandlerFunc(func(m *Message) error {
				if string(m.Body) != "bad" {
					wait()
				}
				return errRDYTest
			}), expired: true,
			then: func(t *testing.T, l life) {
				l.n.conn().sendMessage("00000000000000aa", 1, []byte("bad"))
				synctest.Wait()
				require.Equal(t, 1, l.r.Status().BackoffLevel)
			},
		},
		"the connection is closing": {
			handler: HandlerFunc(func(*Message) error { wait(); return nil }),
			tune:    func(cfg *Config) { cfg.MsgTimeout = 14 * time.Minute },
			then:    func(t *testing.T, l life) { require.NoError(t, l.r.DisconnectFromNSQD(l.n.addr)) },
		},
		"the consumer is stopping": {
			handler: HandlerFunc(func(*Message) error { wait(); return nil }),
			tune:    func(cfg *Config) { cfg.MsgTimeout, cfg.ShutdownTimeout = 14*time.Minute, time.Hour },
			then:    func(t *testing.T, l life) { l.r.Stop() },
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				var log syncedLines
				n.set(func(b *fakeBehaviour) { b.maxMsgTimeout = time.Hour })
				r := newTestConsumer(t, n.cluster, func(cfg *Config) {
					cfg.MaxInFlight, cfg.HeartbeatInterval, cfg.MaxAttempts = 20, beat, 0
					if tt.tune != nil {
						tt.tune(cfg)
					}
				})
				r.SetLogger(&log, LogLevelWarning)
				r.AddConcurrentHandlers(tt.handler, 2)
				t.Cleanup(func() { stopConsumer(t, r, time.Minute); time.Sleep(long) })
				require.NoError(t, r.ConnectToNSQD(n.addr))
				n.publishN(1)
				synctest.Wait()
				if tt.then != nil {
					tt.then(t, life{r, n})
				}
				n.flood(time.Second)
				time.Sleep(long - beat - time.Millisecond)
				n.stopFlood()
				beats, nops := n.cluster.snapshot(byLine(heartbeat)), n.cluster.snapshot(byLine("NOP"))
				require.Len(t, beats, int(long/beat)-2)
				require.Len(t, nops, len(beats))
				for i := range beats {
					require.Equal(t, beats[i].At, nops[i].At)
				}
				require.Len(t, n.dialTimes(), 1)
				require.Equal(t, 1, n.cluster.openConns())

				// That a handler is stuck can be seen, and is told.
				status := r.Status()
				require.Positive(t, status.Running)
				require.Equal(t, tt.expired, status.MessagesExpired > 0)
				require.Equal(t, tt.expired, strings.Contains(log.text(), "has passed before an answer"))
			})
		})
	}
}

// Messages that are never answered time out and come again, also behind each other. Stop gives back what it can, and
// leaves the rest when its time is over.
func TestStopAfterMessagesHaveComeAgain(t *testing.T) {
	tests := map[string]func(release chan struct{}) HandlerFunc{
		"handlers that do not return": func(release chan struct{}) HandlerFunc {
			return func(*Message) error { <-release; return nil }
		},
		"messages that were left to somebody": func(chan struct{}) HandlerFunc {
			return func(m *Message) error { m.DisableAutoResponse(); return nil }
		},
	}
	for name, handler := range tests {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				release := make(chan struct{})
				defer close(release)
				r := newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.MaxInFlight, cfg.MaxAttempts = 2, 0 })
				r.AddHandler(handler(release))
				require.NoError(t, r.ConnectToNSQD(n.addr))
				n.publishN(2)
				time.Sleep(10*time.Minute + 45*time.Second)
				require.Equal(t, 22, n.stats().Delivered)
				stopConsumer(t, r, r.config.ShutdownTimeout+time.Nanosecond)
				synctest.Wait()
				require.Zero(t, n.cluster.openConns())
				require.Zero(t, n.stats().Finished)
			})
		})
	}
}

// Whatever becomes of the connection, calls on a message return at once: from many goroutines, again and again, also the
// long way round that answers take while backoff is on.
func TestAnswersWhileTheConnectionBreaks(t *testing.T) {
	breaks := map[string]func(n *fakeNSQD){
		"a reset":                      (*fakeNSQD).dropAll,
		"a reset of a stuck write":     func(n *fakeNSQD) { n.stopReading(); time.Sleep(time.Second); n.dropAll(); n.startReading() },
		"the end of nsqd's side":       func(n *fakeNSQD) { n.conn().closeWrite() },
		"the end, with a write behind": func(n *fakeNSQD) { n.stopReading(); n.conn().close(); time.Sleep(time.Second); n.startReading() },
	}
	for name, act := range breaks {
		for state, failed := range map[string]bool{"": false, ", in backoff": true} {
			t.Run(name+state, func(t *testing.T) {
				inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
					n.set(func(b *fakeBehaviour) { b.socketBuffer = 0 })
					held := make(heldMessages, 101)
					r := consumeFrom(t, n, 1, held, func(cfg *Config) {
						cfg.MaxInFlight, cfg.MaxBackoffDuration = 101, time.Minute
					})
					n.publishN(101)
					synctest.Wait()
					if m := held.next(t); failed {
						m.Requeue(time.Hour)
						synctest.Wait()
						require.Equal(t, 1, r.Status().BackoffLevel)
					}
					var busy atomic.Bool
					busy.Store(true)
					var answering sync.WaitGroup
					var slowest atomic.Int64
					for i := range 100 {
						m := held.next(t)
						answering.Go(func() {
							for busy.Load() {
								start := time.Now()
								m.Touch()
								if took := int64(time.Since(start)); took > slowest.Load() {
									slowest.Store(took)
								}
								time.Sleep(20 * time.Millisecond)
							}
							start := time.Now()
							if i%2 == 0 {
								m.Finish()
							} else {
								m.Requeue(0)
							}
							if took := int64(time.Since(start)); took > slowest.Load() {
								slowest.Store(took)
							}
						})
					}
					time.Sleep(100 * time.Millisecond)
					act(n)
					busy.Store(false)
					answering.Wait()
					require.Zero(t, slowest.Load())
					n.waitSubscribed()
				})
			})
		}
	}
}

// Messages that nobody answers don't keep a connection that is to be closed: it goes when their timeouts have passed.
func TestDisconnectFromAnNSQDWhoseMessagesAreStuck(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		h := &stuckHandlers{release: make(chan struct{})}
		defer close(h.release)
		r := newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.MaxInFlight, cfg.ShutdownTimeout = 10, 0 })
		r.AddConcurrentHandlers(h, 2)
		defer stopConsumer(t, r, idleStop)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.publishN(5)
		time.Sleep(10 * time.Second)
		require.NoError(t, r.DisconnectFromNSQD(n.addr))
		time.Sleep(40 * time.Second)
		require.Equal(t, 1, n.cluster.openConns(), "they may still be answered")
		time.Sleep(10*time.Second + closeWaitBusy + stragglersBusy + hangUpBusy)
		synctest.Wait()
		require.Zero(t, n.cluster.openConns())
	})
}

// Answers to what a stop has left behind return at once, however many come, also if backoff was on: nobody takes them any
// more.
func TestAnswersAfterTheConsumerHasStopped(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		const messages = 200
		held := make(heldMessages, messages)
		r := newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.MaxInFlight, cfg.ShutdownTimeout = messages, 0 })
		r.AddHandler(held)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.publishN(messages)
		synctest.Wait()
		held.next(t).Requeue(0)
		synctest.Wait()
		require.Equal(t, 1, r.Status().BackoffLevel)
		stopConsumer(t, r, idleStop)
		done := make(chan struct{})
		go func() {
			defer close(done)
			for range messages - 1 {
				m := held.next(t)
				m.Touch()
				m.Requeue(time.Second)
			}
		}()
		synctest.Wait()
		require.True(t, isClosed(done))
	})
}
