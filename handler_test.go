package nsq

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"weak"

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

// arrive makes arrivals of so many messages each.
func arrive(sizes ...int) []*arrivals {
	as := make([]*arrivals, len(sizes))
	for i, n := range sizes {
		as[i] = &arrivals{messages: make([]Message, n), deadline: int64(i + 1)}
	}
	return as
}

// takeWaiting returns the next message as a handler gets it, nil when there will be none.
func takeWaiting(q *inbox) *Message {
	for {
		if m, _ := q.take(); m != nil || !q.wait() {
			return m
		}
	}
}

func TestInbox(t *testing.T) {
	t.Run("keeps the order", func(t *testing.T) {
		q := newInbox()
		as := arrive(3, 1, 5000, 0, 2)
		for _, a := range as {
			q.put(a)
		}
		for _, a := range as {
			for i := range a.messages {
				m, with := q.take()
				require.Same(t, &a.messages[i], m)
				require.Same(t, a, with)
			}
		}
		q.close()
		require.Nil(t, takeWaiting(q))
		require.Zero(t, q.queued)
	})
	t.Run("loses and doubles nothing between many", func(t *testing.T) {
		q := newInbox()
		const total = 4 * 1500
		var got sync.Map
		var taken atomic.Int32
		var putting, taking sync.WaitGroup
		for range 4 {
			taking.Go(func() {
				for m := takeWaiting(q); m != nil; m = takeWaiting(q) {
					if _, twice := got.LoadOrStore(m, true); twice {
						t.Error("a message twice")
					}
					if taken.Add(1) == total {
						q.close()
					}
				}
			})
			putting.Go(func() {
				for _, a := range arrive(100, 1, 99, 500, 300, 500) {
					q.put(a)
				}
			})
		}
		putting.Wait()
		taking.Wait()
		require.EqualValues(t, total, taken.Load())
	})
	t.Run("forgets what was dropped", func(t *testing.T) {
		q := newInbox()
		as := arrive(10, 20, 30)
		for _, a := range as {
			q.put(a)
			for i := range a.messages {
				require.True(t, a.messages[i].state.drop())
			}
		}
		as[1].messages[7].state.bits.Store(0)
		q.purge()
		require.Equal(t, 20, q.queued)
		for i := range as[1].messages {
			m, _ := q.take()
			require.Same(t, &as[1].messages[i], m)
		}
		require.Zero(t, q.queued)
	})
	t.Run("wakes as many handlers as there are messages", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			q := newInbox()
			var taken atomic.Int32
			release := make(chan struct{})
			for range 10 {
				go func() {
					for m := takeWaiting(q); m != nil; m = takeWaiting(q) {
						taken.Add(1)
						<-release
					}
				}()
			}
			for want, a := range arrive(0, 1, 2, 3, 4, 1) {
				synctest.Wait()
				q.put(a)
				synctest.Wait()
				require.EqualValues(t, []int32{0, 1, 3, 6, 10, 10}[want], taken.Load())
			}
			close(release)
			synctest.Wait()
			require.EqualValues(t, 11, taken.Load())
			q.close()
		})
	})
	t.Run("holds no messages that are done", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			q := newInbox()
			done := make(chan weak.Pointer[arrivals], 1)
			go func() {
				a := arrive(1)[0]
				q.put(a)
				q.take()
				done <- weak.Make(a)
				takeWaiting(q)
			}()
			synctest.Wait()
			runtime.GC()
			require.Nil(t, (<-done).Value())
			q.close()
		})
	})
}

func TestOneSideTakesAMessage(t *testing.T) {
	for range 200 {
		var s messageState
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
	many := arrive(10*minSearch, 10*minSearch) // a flood that is over leaves no mark
	for _, a := range many {
		q.put(a)
	}
	for _, a := range many {
		for i := range a.messages {
			a.messages[i].state.drop()
		}
	}
	q.purge()
	for range 1000 {
		a := arrive(100)[0]
		q.put(a)
		for i := range a.messages {
			a.messages[i].state.drop()
		}
		require.LessOrEqual(t, q.queued, 4*minSearch)
	}
}
