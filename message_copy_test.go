package nsq

import (
	"errors"
	"math/rand/v2"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// copied is *m as a new message. reflect, since package vet does not like c := *m.
func copied(m *Message) *Message {
	c := reflect.New(reflect.TypeFor[Message]())
	c.Elem().Set(reflect.ValueOf(m).Elem())
	return c.Interface().(*Message)
}

// remade is a new message with the ID and the delegate of m.
func remade(m *Message) *Message {
	c := NewMessage(m.ID, []byte("decoded"))
	c.Delegate = m.Delegate
	return c
}

// Programs embed messages in structs of their own, and middleware makes new ones with another body. Their answers count
// like those of the message itself, and the first one counts.
func TestCopiesOfAMessageMayAnswer(t *testing.T) {
	for name, other := range map[string]func(m *Message) *Message{"a copy": copied, "one made by hand": remade} {
		for does, test := range map[string]struct {
			handle func(m, other *Message) error
			want   []string // all commands of that message, without its ID
		}{
			"finishes": {func(_, o *Message) error { o.Finish(); return nil }, []string{"FIN"}},
			"requeues": {func(_, o *Message) error { o.RequeueWithoutBackoff(0); return nil }, []string{"REQ", "FIN"}},
			"finishes first": {func(m, o *Message) error {
				o.Finish()
				m.Requeue(0)
				o.Touch()
				return nil
			}, []string{"FIN"}},
			"is too late": {func(m, o *Message) error {
				m.Finish()
				o.Requeue(0)
				o.Touch()
				return nil
			}, []string{"FIN"}},
			"touches": {func(m, o *Message) error {
				time.Sleep(40 * time.Second)
				o.Touch()
				time.Sleep(40 * time.Second)
				return nil
			}, []string{"TOUCH", "FIN"}},
			"touches, and the message expires": {func(m, o *Message) error {
				o.Touch()
				time.Sleep(61 * time.Second)
				o.Finish()
				return nil
			}, []string{"TOUCH", "FIN"}},
			"is made ahead of the message's expiry": {func(m, o *Message) error { // nothing else that would order the two
				time.Sleep(61 * time.Second)
				o.Finish()
				return nil
			}, []string{"FIN"}},
			"answers later": {func(m, o *Message) error {
				m.DisableAutoResponse()
				go func() {
					time.Sleep(time.Second)
					o.Finish()
					m.Finish()
				}()
				return nil
			}, []string{"FIN"}},
		} {
			t.Run(name+" "+does, func(t *testing.T) {
				inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
					done := make(chan struct{}, 10)
					r := newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.MaxInFlight = 10 })
					r.AddHandler(HandlerFunc(func(m *Message) error {
						if m.Attempts > 1 || string(m.Body) != "x" {
							return nil
						}
						defer func() { done <- struct{}{} }()
						return test.handle(m, other(m))
					}))
					require.NoError(t, r.ConnectToNSQD(n.addr))
					id := n.publish("x")[0]
					<-done
					time.Sleep(2 * time.Second)
					var got []string
					for _, e := range n.cluster.snapshot(byKind(entryCommand)) {
						for _, command := range []string{"FIN", "REQ", "TOUCH"} {
							if e.Line == command+" "+id || e.Line == command+" "+id+" 0" {
								got = append(got, command)
							}
						}
					}
					require.Equal(t, test.want, got)
					n.publish("y")
					n.cluster.waitUntil(func() bool { return n.stats().InFlight == 0 })
					require.Equal(t, 1, n.cluster.openConns())
					stopConsumer(t, r, time.Second)
				})
			})
		}
	}
}

// randomAnswers is a handler that answers in all ways there are, be it late, twice, by a copy or never, until it is calm.
type randomAnswers struct {
	t     *testing.T
	later sync.WaitGroup // goroutines that answer

	mu       sync.Mutex // guards the fields below
	rng      *rand.Rand
	calm     bool
	finishes map[string]bool // IDs of messages that a handler wanted to finish
}

func (h *randomAnswers) roll(n int) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.rng.IntN(n)
}

func (h *randomAnswers) finish(m *Message) error {
	h.mu.Lock()
	h.finishes[string(m.ID[:])] = true
	h.mu.Unlock()
	m.Finish()
	return nil
}

func (h *randomAnswers) HandleMessage(m *Message) error {
	assert.NotEmpty(h.t, m.Body, "of a message that was dropped")
	h.mu.Lock()
	calm := h.calm
	h.mu.Unlock()
	if calm {
		return h.finish(m)
	}
	by := []func(*Message) *Message{copied, remade, func(m *Message) *Message { return m }}[h.roll(3)](m)
	pause := func(seconds int) { time.Sleep(time.Duration(h.roll(1000*seconds)) * time.Millisecond) }
	switch h.roll(12) {
	case 0:
		pause(15)
	case 1:
		by.Touch()
		pause(8)
		by.Touch()
	case 2:
		by.Requeue(0)
	case 3:
		by.RequeueWithoutBackoff(time.Second)
		return h.finish(by)
	case 4, 5:
		m.DisableAutoResponse()
		h.later.Go(func() {
			pause(12)
			if h.roll(2) == 0 {
				_ = h.finish(by)
			} else {
				by.Requeue(0)
			}
		})
		return nil
	case 6:
		m.DisableAutoResponse()
		return nil
	case 7:
		panic("boom")
	case 8:
		runtime.Goexit()
	case 9:
		return errors.New("no good")
	}
	_ = h.finish(by)
	return h.finish(m)
}

// Whatever handlers do, each message is finished in the end, none that nobody wanted to finish, and nothing is left behind.
func TestRandomAnswersLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	seeds := uint64(12)
	if raceDetector {
		seeds = 3
	}
	for seed := range seeds {
		inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
			n.set(func(b *fakeBehaviour) { b.msgTimeout, b.maxMsgTimeout = 5*time.Second, 20*time.Second })
			h := &randomAnswers{t: t, rng: rand.New(rand.NewPCG(seed, 1)), finishes: map[string]bool{}}
			r := newTestConsumer(t, n.cluster, func(cfg *Config) {
				cfg.MaxInFlight = 1 + h.roll(200)
				cfg.MaxAttempts, cfg.DefaultRequeueDelay = 0, 0
				cfg.MaxBackoffDuration, cfg.BackoffMultiplier = time.Duration(h.roll(2))*time.Second, time.Millisecond
			})
			r.AddConcurrentHandlers(h, 1+h.roll(20))
			require.NoError(t, r.ConnectToNSQD(n.addr))
			published := 0
			for range 60 {
				published += len(n.publishN(h.roll(50)))
				time.Sleep(time.Duration(h.roll(2000)) * time.Millisecond)
				switch h.roll(8) {
				case 0:
					n.dropAll()
				case 1:
					r.ChangeMaxInFlight(h.roll(100))
				case 2:
					n.stopReadingFor(time.Duration(h.roll(6000)) * time.Millisecond)
				case 3:
					over := h.roll(100)
					n.set(func(b *fakeBehaviour) { b.overRDY = over })
				case 4:
					delay := time.Duration(h.roll(300)) * time.Millisecond
					n.set(func(b *fakeBehaviour) { b.readDelay = delay })
				}
			}
			h.mu.Lock()
			h.calm = true
			h.mu.Unlock()
			n.set(func(b *fakeBehaviour) { b.overRDY, b.readDelay = 0, 0 })
			r.ChangeMaxInFlight(100)
			n.cluster.waitUntil(func() bool { return n.stats().Finished == published })
			time.Sleep(30 * time.Second) // beyond all timeouts
			h.later.Wait()
			synctest.Wait()

			for _, e := range n.cluster.snapshot(byKind(entryCommand)) {
				if id, ok := strings.CutPrefix(e.Line, "FIN "); ok {
					require.True(t, h.finishes[id], "nobody wanted to finish %s, seed %d", id, seed)
				}
			}
			status := r.Status()
			require.Equal(t, [4]int{}, [4]int{status.InFlight, status.Buffered, status.Running, r.inbox.queued})
			require.LessOrEqual(t, status.MessagesReceived, uint64(n.stats().Delivered))
			table := &r.conns()[0].table
			require.Zero(t, table.bytes)
			for i := range table.slots {
				require.Nil(t, table.slots[i].m)
			}
			stopConsumer(t, r, time.Second)
		})
	}
}
