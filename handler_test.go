package nsq

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Promise 18: a panic in a handler is a failed message, and the process lives.
func TestHandlerThatBreaks(t *testing.T) {
	for name, test := range map[string]struct {
		breaks func(m *Message)
		want   string // what the first message is answered with
		log    string
	}{
		"a panic":                   {func(*Message) { panic("boom") }, "REQ 0000000000000001 0", "Handler panicked (boom) for msg 0000000000000001"},
		"a panic with an error":     {func(*Message) { panic(errors.New("bang")) }, "REQ 0000000000000001 0", "Handler panicked (bang)"},
		"a panic of the runtime":    {func(m *Message) { _ = m.Body[99] }, "REQ 0000000000000001 0", "index out of range"},
		"a panic with nil":          {func(*Message) { panic(nil) }, "REQ 0000000000000001 0", "Handler panicked"},
		"Goexit":                    {func(*Message) { runtime.Goexit() }, "REQ 0000000000000001 0", "runtime.Goexit"},
		"a panic behind the answer": {func(m *Message) { m.Finish(); panic("boom") }, "FIN 0000000000000001", "boom"},
		"Goexit behind the answer":  {func(m *Message) { m.Finish(); runtime.Goexit() }, "FIN 0000000000000001", "runtime.Goexit"},
		"a panic with auto off":     {func(m *Message) { m.DisableAutoResponse(); panic("boom") }, "REQ 0000000000000001 0", "boom"},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				var log syncedLines
				handler := HandlerFunc(func(m *Message) error {
					if m.Attempts == 1 && string(m.Body) == "1" {
						test.breaks(m)
					}
					return nil
				})
				r := consumeFrom(t, n, 1, handler, nil)
				r.SetLogger(&log, LogLevelWarning)
				n.publishN(3)
				synctest.Wait()
				require.Equal(t, test.want, answersTo(n)[0])
				require.Equal(t, 3, n.stats().Finished)
				require.Contains(t, log.text(), "ERR")
				require.Contains(t, log.text(), test.log)
				if test.log != "runtime.Goexit" {
					require.Contains(t, log.text(), "TestHandlerThatBreaks", "the stack")
				}
				require.Zero(t, r.Status().Running)
				require.Zero(t, r.Status().InFlight)
			})
		})
	}
}

func TestManyHandlersThatBreak(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		handler := HandlerFunc(func(m *Message) error {
			switch {
			case m.Attempts == 1:
				runtime.Goexit()
			case m.Attempts == 2:
				panic("boom")
			}
			return nil
		})
		r := consumeFrom(t, n, 3, handler, nil)
		n.publishN(100)
		synctest.Wait()
		require.Equal(t, 100, n.stats().Finished)
		require.Equal(t, 200, n.stats().Requeued)
		require.Zero(t, r.Status().Running)
		stopConsumer(t, r, 100*time.Millisecond)
	})
}

func TestPanicCausesBackoff(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		handler := HandlerFunc(func(m *Message) error {
			if m.Attempts == 1 {
				panic("boom")
			}
			return nil
		})
		consumeFrom(t, n, 1, handler, func(cfg *Config) { cfg.MaxBackoffDuration, cfg.MaxInFlight = time.Minute, 1 })
		id := n.publishN(1)[0]
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{"RDY 1", "RDY 0", "REQ " + id + " 0", "RDY 1", "FIN " + id}, n.commands("IDENTIFY", "SUB"))
	})
}

func TestFailureIsLogged(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		var log syncedLines
		r := consumeFrom(t, n, 1, HandlerFunc(func(m *Message) error {
			if m.Attempts == 1 {
				return errors.New("no good")
			}
			return nil
		}), nil)
		r.SetLogger(&log, LogLevelError)
		n.publishN(1)
		synctest.Wait()
		require.Contains(t, log.text(), "Handler returned error (no good) for msg 0000000000000001")
		require.Equal(t, []string{"REQ 0000000000000001 0", "FIN 0000000000000001"}, answersTo(n))
	})
}

func TestHandlersShareMessages(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		var mu sync.Mutex
		seen := map[string]int{}
		var counts, most [2]int
		var running [2]int
		make1 := func(i int) Handler {
			return HandlerFunc(func(m *Message) error {
				mu.Lock()
				seen[string(m.ID[:])]++
				counts[i]++
				running[i]++
				most[i] = max(most[i], running[i])
				mu.Unlock()
				time.Sleep(time.Millisecond)
				mu.Lock()
				running[i]--
				mu.Unlock()
				return nil
			})
		}
		r := newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.MaxInFlight = 20 })
		r.AddConcurrentHandlers(make1(0), 3)
		r.AddConcurrentHandlers(make1(1), 2)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.publishN(100)
		n.cluster.waitUntil(func() bool { return n.stats().Finished == 100 })
		stopConsumer(t, r, time.Second)
		require.Len(t, seen, 100)
		require.Equal(t, 100, counts[0]+counts[1], "each message goes to one of them")
		require.Equal(t, [2]int{3, 2}, most)
	})
}

// Promise 18: bad input is the error of the next connect, never a panic.
func TestBadHandlers(t *testing.T) {
	good := HandlerFunc(func(*Message) error { return nil })
	for name, test := range map[string]struct {
		add  func(r *Consumer)
		want string
	}{
		"none":                        {func(*Consumer) {}, "no handlers"},
		"nil":                         {func(r *Consumer) { r.AddHandler(nil) }, "nil handler"},
		"a nil func":                  {func(r *Consumer) { r.AddHandler(HandlerFunc(nil)) }, "nil handler"},
		"a nil pointer":               {func(r *Consumer) { r.AddHandler((*failingHandler)(nil)) }, "nil handler"},
		"nil among good ones":         {func(r *Consumer) { r.AddHandler(good); r.AddHandler(nil); r.AddHandler(good) }, "nil handler"},
		"a concurrency of 0":          {func(r *Consumer) { r.AddConcurrentHandlers(good, 0) }, "concurrency of 0"},
		"a concurrency of -1":         {func(r *Consumer) { r.AddConcurrentHandlers(good, -1) }, "concurrency of -1"},
		"nil and a concurrency of -1": {func(r *Consumer) { r.AddConcurrentHandlers(nil, -1) }, "nil handler"},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				r := newTestConsumer(t, n.cluster, nil)
				test.add(r)
				require.ErrorContains(t, r.ConnectToNSQD(n.addr), test.want)
				require.ErrorContains(t, r.ConnectToNSQD("not an address"), test.want, "in this order")
				require.ErrorContains(t, r.ConnectToNSQLookupd("127.0.0.1:4161"), test.want)
				require.Empty(t, n.dialTimes())
				require.NotPanics(t, func() { r.AddHandler(good) }, "it is not connected yet")
				stopConsumer(t, r, 100*time.Millisecond)
				require.EqualError(t, r.ConnectToNSQD(n.addr), "consumer stopped")
				require.EqualError(t, r.ConnectToNSQLookupd("127.0.0.1:4161"), "consumer stopped")
			})
		})
	}
}

func TestAddHandlerAfterConnectPanics(t *testing.T) {
	for name, refused := range map[string]bool{"once connected": false, "also when the dial failed": true} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				if refused {
					n.setReach(reachRefused)
				}
				r := unconnected(t, n, nil)
				require.Equal(t, refused, r.ConnectToNSQD(n.addr) != nil)
				require.PanicsWithValue(t, "already connected", func() { r.AddHandler(HandlerFunc(func(*Message) error { return nil })) })
				require.NotPanics(t, func() { r.Status() }, "no lock is left behind")
			})
		})
	}
}

func TestNewConsumerRefusesBadInput(t *testing.T) {
	bad := NewConfig()
	bad.DeflateLevel = 100
	for name, test := range map[string]struct {
		topic, channel string
		cfg            *Config
		want           string
	}{
		"a nil config":          {"t", "c", nil, "NewConfig()"},
		"a literal config":      {"t", "c", &Config{}, "NewConfig()"},
		"a config out of range": {"t", "c", bad, "DeflateLevel"},
		"a bad topic":           {"t t", "c", NewConfig(), "invalid topic name"},
		"a bad channel":         {"t", "", NewConfig(), "invalid channel name"},
		"all of it":             {"", "", &Config{}, "NewConfig()"},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := NewConsumer(test.topic, test.channel, test.cfg)
			require.Nil(t, r)
			require.ErrorContains(t, err, test.want)
		})
	}
}

func TestConfigOfAConsumerIsItsOwn(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		var mine *Config
		r := newTestConsumer(t, n.cluster, func(cfg *Config) { mine = cfg })
		mine.MaxInFlight = 77
		mine.Dial = nil
		r.AddHandler(HandlerFunc(func(*Message) error { return nil }))
		require.NoError(t, r.ConnectToNSQD(n.addr))
		synctest.Wait()
		require.Equal(t, []string{"IDENTIFY", "SUB t c", "RDY 1"}, n.commands())
		stopConsumer(t, r, time.Second)
	})
}

// A handler that waits for others doesn't keep messages from them.
func TestIdleHandlersGetMessages(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		release := make(chan struct{})
		var runs atomic.Int32
		consumeFrom(t, n, 2, HandlerFunc(func(*Message) error {
			if runs.Add(1) == 1 {
				<-release
			}
			return nil
		}), nil)
		n.publishN(50)
		synctest.Wait()
		require.EqualValues(t, 50, runs.Load())
		require.Equal(t, 49, n.stats().Finished)
		close(release)
	})
}

func TestInbox(t *testing.T) {
	make1 := func(n int) []*Message {
		ms := make([]*Message, n)
		for i := range ms {
			ms[i] = &Message{Body: fmt.Append(nil, i)}
		}
		return ms
	}
	never := make(chan struct{})
	done := make(chan struct{})
	close(done)
	t.Run("keeps the order, also beyond the channel", func(t *testing.T) {
		q := newInbox()
		ms := make1(5 * inboxSize)
		q.put(ms[:10])
		q.put(ms[10:])
		require.EqualValues(t, 4*inboxSize, q.overflow.Load())
		for _, want := range ms {
			require.Same(t, want, q.take(never))
		}
		require.Nil(t, q.take(done))
		require.Zero(t, q.overflow.Load())
	})
	t.Run("loses and doubles nothing between many", func(t *testing.T) {
		q := newInbox()
		const total = 4 * 1500
		var got sync.Map
		var taken atomic.Int32
		var putting, taking sync.WaitGroup
		end := make(chan struct{})
		for range 4 {
			taking.Go(func() {
				for m := q.take(end); m != nil; m = q.take(end) {
					if _, twice := got.LoadOrStore(m, true); twice {
						t.Error("a message twice")
					}
					if taken.Add(1) == total {
						close(end)
					}
				}
			})
			putting.Go(func() {
				for ms := make1(1500); len(ms) > 0; ms = ms[100:] {
					q.put(ms[:100])
				}
			})
		}
		putting.Wait()
		taking.Wait()
		require.EqualValues(t, total, taken.Load())
	})
	t.Run("forgets what was dropped", func(t *testing.T) {
		q := newInbox()
		ms := make1(inboxSize + 100)
		q.put(ms)
		for _, m := range ms[inboxSize:] {
			require.True(t, m.delivery.state.drop())
		}
		ms[inboxSize+7].delivery.state.v.Store(deliveryQueued)
		q.purge()
		require.EqualValues(t, 1, q.overflow.Load())
		for _, want := range append(ms[:inboxSize:inboxSize], ms[inboxSize+7]) {
			require.Same(t, want, q.take(never))
		}
	})
}

func TestOneSideTakesAMessage(t *testing.T) {
	for range 200 {
		var s deliveryState
		var wins atomic.Int32
		var racing sync.WaitGroup
		for i := range 4 {
			racing.Go(func() {
				if i%2 == 0 && s.run() || i%2 == 1 && s.drop() {
					wins.Add(1)
				}
			})
		}
		racing.Wait()
		require.EqualValues(t, 1, wins.Load())
		require.False(t, s.queued())
	}
}

// Handlers that are stuck don't look, and nothing else would.
func TestDroppedMessagesLeaveTheInbox(t *testing.T) {
	q := newInbox()
	for range 100 {
		ms := make([]*Message, inboxSize)
		for i := range ms {
			ms[i] = new(Message)
		}
		q.put(ms)
		for _, m := range ms {
			m.delivery.state.drop()
		}
		require.LessOrEqual(t, q.overflow.Load(), int64(4*inboxSize))
	}
}
