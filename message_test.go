package nsq

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// consumeFrom connects a silent consumer of n, whose handler runs at that concurrency, and stops it at the test's end.
// Backoff is off, so that only what a test is about moves RDY, and failed messages come again at once.
func consumeFrom(t *testing.T, n *fakeNSQD, concurrency int, h Handler, tune func(cfg *Config)) *Consumer {
	t.Helper()
	r := newTestConsumer(t, n.cluster, func(cfg *Config) {
		cfg.MaxInFlight = 10
		cfg.MaxBackoffDuration = 0
		cfg.DefaultRequeueDelay = 0
		if tune != nil {
			tune(cfg)
		}
	})
	r.AddConcurrentHandlers(h, concurrency)
	t.Cleanup(func() { stopConsumer(t, r, time.Minute) })
	require.NoError(t, r.ConnectToNSQD(n.addr))
	synctest.Wait()
	return r
}

// answersTo returns what was answered to n: FIN, REQ and TOUCH.
func answersTo(n *fakeNSQD) []string {
	return n.commands("IDENTIFY", "AUTH", "SUB", "RDY", "NOP", "CLS")
}

// heldMessages is a handler that passes each message on and leaves the answer to the test.
type heldMessages chan *Message

func (h heldMessages) HandleMessage(m *Message) error {
	m.DisableAutoResponse()
	h <- m
	return nil
}

// next waits for a message.
func (h heldMessages) next(t *testing.T) *Message {
	t.Helper()
	select {
	case m := <-h:
		return m
	case <-time.After(time.Hour):
		require.FailNow(t, "no message came")
		return nil
	}
}

func (h heldMessages) none(t *testing.T) {
	t.Helper()
	synctest.Wait()
	require.Empty(t, h, "a message too many")
}

// recordingDelegate notes the answers that it gets.
type recordingDelegate struct{ got []string }

func (d *recordingDelegate) OnFinish(*Message) { d.got = append(d.got, "finish") }
func (d *recordingDelegate) OnTouch(*Message)  { d.got = append(d.got, "touch") }
func (d *recordingDelegate) OnRequeue(_ *Message, delay time.Duration, backoff bool) {
	d.got = append(d.got, fmt.Sprintf("requeue %d %t", delay, backoff))
}

func TestFirstAnswerOfAMessageCounts(t *testing.T) {
	for name, test := range map[string]struct {
		answer func(m *Message)
		want   []string
	}{
		"finish":                   {(*Message).Finish, []string{"finish"}},
		"touch, then finish":       {func(m *Message) { m.Touch(); m.Touch(); m.Finish() }, []string{"touch", "touch", "finish"}},
		"requeue":                  {func(m *Message) { m.Requeue(time.Second) }, []string{"requeue 1000000000 true"}},
		"requeue without backoff":  {func(m *Message) { m.RequeueWithoutBackoff(0) }, []string{"requeue 0 false"}},
		"the delay -1 is told raw": {func(m *Message) { m.Requeue(-1) }, []string{"requeue -1 true"}},
	} {
		t.Run(name, func(t *testing.T) {
			d := &recordingDelegate{}
			m := NewMessage(MessageID{1}, []byte("body"))
			m.Delegate = d
			require.False(t, m.HasResponded())
			test.answer(m)
			require.True(t, m.HasResponded())
			m.Finish()
			m.Touch()
			m.Requeue(0)
			m.RequeueWithoutBackoff(0)
			require.Equal(t, test.want, d.got)
		})
	}
}

func TestMessageWithoutDelegateMayBeAnswered(t *testing.T) {
	m := NewMessage(MessageID{1}, []byte("body"))
	m.Touch()
	require.False(t, m.HasResponded())
	m.Requeue(-1)
	m.Finish()
	require.True(t, m.HasResponded())
	require.EqualValues(t, 0, m.Attempts)
	require.WithinDuration(t, time.Now(), time.Unix(0, m.Timestamp), time.Minute)
}

func TestMessageRoundTrip(t *testing.T) {
	m := &Message{ID: MessageID([]byte("0123456789abcdef")), Body: []byte("body"), Timestamp: math.MaxInt64 - 1, Attempts: 65535}
	var b bytes.Buffer
	n, err := m.WriteTo(&b)
	require.NoError(t, err)
	require.EqualValues(t, b.Len(), n)
	got, err := DecodeMessage(b.Bytes())
	require.NoError(t, err)
	require.Equal(t, []any{m.ID, m.Body, m.Timestamp, m.Attempts}, []any{got.ID, got.Body, got.Timestamp, got.Attempts})
	b.Bytes()[messageHeaderSize] = 'B'
	require.Equal(t, "Body", string(got.Body), "the body aliases what was decoded")

	empty, err := DecodeMessage(b.Bytes()[:messageHeaderSize])
	require.NoError(t, err)
	require.Empty(t, empty.Body)
	for short := range messageHeaderSize {
		_, err = DecodeMessage(b.Bytes()[:short])
		require.EqualError(t, err, "not enough data to decode valid message")
	}
}

// Promise 1: one answer for each delivery, whoever gives it.
func TestAnswerGoesOnceToTheWire(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		const messages = 40
		var racing sync.WaitGroup
		handler := HandlerFunc(func(m *Message) error {
			m.DisableAutoResponse()
			if m.Attempts > 1 {
				m.Finish()
				return nil
			}
			for range 3 {
				racing.Go(m.Finish)
				racing.Go(func() { m.RequeueWithoutBackoff(0) })
				racing.Go(func() { m.Requeue(0) })
				racing.Go(m.Touch)
			}
			return nil
		})
		r := consumeFrom(t, n, 3, handler, nil)
		ids := n.publishN(messages)
		n.cluster.waitUntil(func() bool { return n.stats().Finished == messages })
		synctest.Wait() // handlers have begun all that races
		racing.Wait()
		synctest.Wait()

		deliveries, answers := map[string]int{}, map[string]int{}
		for _, e := range n.cluster.snapshot(byKind(entryMessage, entryCommand)) {
			switch {
			case e.Kind == entryMessage:
				deliveries[e.ID]++
			case e.name() == "FIN", e.name() == "REQ":
				answers[e.words()[1]]++
			}
		}
		require.Len(t, deliveries, len(ids))
		require.Equal(t, deliveries, answers)
		require.Zero(t, n.stats().Failed, "nsqd saw an answer or a TOUCH too many")
		require.EqualValues(t, n.stats().Delivered, r.Stats().MessagesReceived)
		require.EqualValues(t, messages, r.Stats().MessagesFinished)
		require.EqualValues(t, n.stats().Requeued, r.Stats().MessagesRequeued)
	})
}

// Promise 1, with the answers going through the loop that knows of backoff.
func TestAnswerGoesOnceToTheWireInBackoff(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		var racing sync.WaitGroup
		handler := HandlerFunc(func(m *Message) error {
			m.DisableAutoResponse()
			for range 3 {
				racing.Go(m.Finish)
				if m.Attempts < 3 { // who wins is the scheduler's choice, and it may be the same each time
					racing.Go(func() { m.Requeue(0) })
				}
			}
			return nil
		})
		consumeFrom(t, n, 3, handler, func(cfg *Config) {
			cfg.MaxBackoffDuration = 4 * time.Second
			cfg.MaxAttempts = 0
		})
		n.publishN(20)
		n.cluster.waitUntil(func() bool { return n.stats().Finished == 20 })
		synctest.Wait() // handlers have begun all that races
		racing.Wait()
		synctest.Wait()
		require.Equal(t, n.stats().Delivered, n.stats().Finished+n.stats().Requeued)
		require.Zero(t, n.stats().Failed)
	})
}

// Promise 1: no answer on another connection than the one that delivered the message.
func TestAnswerNeverGoesOutOnAnotherConnection(t *testing.T) {
	for name, answer := range map[string]func(m *Message){
		"finish":                  (*Message).Finish,
		"requeue":                 func(m *Message) { m.Requeue(0) },
		"requeue without backoff": func(m *Message) { m.RequeueWithoutBackoff(0) },
		"touch":                   (*Message).Touch,
	} {
		for when, redelivered := range map[string]bool{"before the message comes again": false, "while another handler has it": true} {
			t.Run(name+" "+when, func(t *testing.T) {
				inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
					held := make(heldMessages, 10)
					r := consumeFrom(t, n, 2, held, nil)
					id := n.publishN(1)[0]
					old := held.next(t)
					first := n.conn()
					n.dropAll()
					synctest.Wait()
					require.Zero(t, r.Status().InFlight)
					second := n.waitSubscribed()
					require.NotEqual(t, first.number, second.number)
					var again *Message
					if redelivered {
						n.expire(id)
						again = held.next(t)
						require.Equal(t, old.ID, again.ID)
					}
					answer(old)
					synctest.Wait()
					require.Empty(t, answersTo(n))
					require.EqualValues(t, 1, r.Status().LateAnswers)

					if again == nil {
						n.expire(id)
						again = held.next(t)
					}
					require.EqualValues(t, 2, again.Attempts)
					again.Finish()
					synctest.Wait()
					require.Equal(t, []string{"FIN " + id}, answersTo(n), "at least once")
					require.Equal(t, []string{"FIN " + id}, second.sent("IDENTIFY", "SUB", "RDY"))
				})
			})
		}
	}
}

// Promise 3: what waits in the queue too long is for somebody else.
func TestQueuedMessagesExpire(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		var runs atomic.Int32
		release := make(chan struct{})
		handler := HandlerFunc(func(m *Message) error {
			if runs.Add(1) == 1 {
				<-release
			}
			return nil
		})
		r := consumeFrom(t, n, 1, handler, nil)
		n.publishN(3)
		synctest.Wait()
		n.set(func(b *fakeBehaviour) { b.paused = true }) // what times out does not come at once
		require.Equal(t, 3, r.Status().InFlight)
		require.Equal(t, 2, r.Status().Buffered)

		time.Sleep(time.Minute - time.Nanosecond)
		synctest.Wait()
		require.Equal(t, 3, r.Status().InFlight)
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		status := r.Status()
		require.Zero(t, status.InFlight, "they leave max-in-flight at once")
		require.Zero(t, status.Buffered)
		require.Equal(t, 1, status.Running)
		require.EqualValues(t, 3, status.MessagesExpired)
		require.Zero(t, status.LateAnswers)

		close(release)
		synctest.Wait()
		require.EqualValues(t, 1, runs.Load(), "expired messages must not reach a handler")
		require.Empty(t, answersTo(n), "an expired delivery gets no command")
		require.EqualValues(t, 1, r.Status().LateAnswers, "the suppressed FIN")
		require.EqualValues(t, 3, r.Status().MessagesReceived)
		require.Zero(t, r.Status().MessagesFinished)

		n.set(func(b *fakeBehaviour) { b.paused = false })
		synctest.Wait()
		require.Equal(t, 3, n.stats().Finished)
		require.EqualValues(t, 4, runs.Load())
	})
}

// Promise 3: a handler that gets free at the very moment of the deadline must not begin.
func TestMessageTakenAtItsDeadlineIsDropped(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		var runs atomic.Int32
		handler := HandlerFunc(func(m *Message) error {
			if runs.Add(1) == 1 {
				time.Sleep(time.Minute) // ends with the deadline of all
			}
			return nil
		})
		r := consumeFrom(t, n, 1, handler, nil)
		n.publishN(3)
		synctest.Wait()
		n.set(func(b *fakeBehaviour) { b.paused = true })
		time.Sleep(time.Minute)
		synctest.Wait()
		require.EqualValues(t, 1, runs.Load())
		require.Zero(t, r.Status().InFlight)
		require.GreaterOrEqual(t, r.Status().MessagesExpired, uint64(2))
	})
}

// Promise 3: how long the client believes a message to be its own.
func TestWhereTheMessageTimeoutComesFrom(t *testing.T) {
	for name, test := range map[string]struct {
		behave func(b *fakeBehaviour)
		tune   func(cfg *Config)
		want   time.Duration // 0: none
	}{
		"nsqd tells": {want: time.Minute},
		"nsqd tells what it was asked for": {
			tune: func(cfg *Config) { cfg.MsgTimeout = 7 * time.Second }, want: 7 * time.Second,
		},
		"nsqd tells something else than it was asked for": {
			behave: func(b *fakeBehaviour) {
				b.editIdentify = func(answer map[string]any) { answer["msg_timeout"] = 3000 }
			},
			tune: func(cfg *Config) { cfg.MsgTimeout = 7 * time.Second }, want: 3 * time.Second,
		},
		"nsqd tells nothing, the config does": {
			behave: func(b *fakeBehaviour) { b.plainOK = true },
			tune:   func(cfg *Config) { cfg.MsgTimeout = 7 * time.Second }, want: 7 * time.Second,
		},
		"nobody tells": {behave: func(b *fakeBehaviour) { b.plainOK, b.msgTimeout = true, 24*time.Hour }},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				if test.behave != nil {
					n.set(test.behave)
				}
				held := make(heldMessages, 1)
				r := consumeFrom(t, n, 1, held, test.tune)
				id := n.publishN(1)[0]
				m := held.next(t)
				n.set(func(b *fakeBehaviour) { b.paused = true })
				if test.want == 0 {
					time.Sleep(5 * time.Hour)
					m.Finish()
					synctest.Wait()
					require.Equal(t, []string{"FIN " + id}, answersTo(n))
					return
				}
				time.Sleep(test.want - time.Nanosecond)
				synctest.Wait()
				require.Equal(t, 1, r.Status().InFlight)
				time.Sleep(time.Nanosecond)
				synctest.Wait()
				require.Zero(t, r.Status().InFlight)
				m.Finish()
				synctest.Wait()
				require.Empty(t, answersTo(n))
			})
		})
	}
}

// Promise 3: what a lost connection delivered and nobody has begun is for somebody else.
func TestMessagesOfALostConnectionAreNotHandled(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		var runs atomic.Int32
		release := make(chan struct{})
		handler := HandlerFunc(func(m *Message) error {
			runs.Add(1)
			<-release
			return nil
		})
		r := consumeFrom(t, n, 1, handler, nil)
		n.publishN(5)
		synctest.Wait()
		require.Equal(t, 5, r.Status().InFlight)
		n.down()
		synctest.Wait()
		require.Zero(t, r.Status().InFlight)
		require.Zero(t, r.Status().Buffered)
		close(release)
		synctest.Wait()
		require.EqualValues(t, 1, runs.Load())
		require.EqualValues(t, 1, r.Status().LateAnswers)

		n.up()
		n.expire()
		n.cluster.waitUntil(func() bool { return n.stats().Finished == 5 })
		require.EqualValues(t, 6, runs.Load())
	})
}

// The same id again on the same connection, as after a timeout that the client did not notice. nsqd takes an answer to
// the old delivery as one to the new.
func TestMessageComesAgainOnTheSameConnection(t *testing.T) {
	for name, test := range map[string]struct {
		begun  bool             // a handler has the new delivery when the old one is answered
		answer func(m *Message) // to the old delivery
		saved  bool             // the answer holds for the new delivery
	}{
		"REQ of the old one is suppressed":                          {answer: func(m *Message) { m.Requeue(0) }},
		"TOUCH of the old one is suppressed":                        {answer: (*Message).Touch},
		"FIN of the old one saves the new one from being handled":   {answer: (*Message).Finish, saved: true},
		"REQ of the old one is suppressed while the new one runs":   {begun: true, answer: func(m *Message) { m.Requeue(0) }},
		"TOUCH of the old one is suppressed while the new one runs": {begun: true, answer: (*Message).Touch},
		"FIN of the old one holds while the new one runs":           {begun: true, answer: (*Message).Finish, saved: true},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				held := make(heldMessages, 10)
				concurrency := 1
				gate := make(chan struct{})
				if test.begun {
					concurrency = 2
				}
				handler := HandlerFunc(func(m *Message) error {
					_ = held.HandleMessage(m)
					if m.Attempts == 1 && !test.begun {
						<-gate // keeps the only handler from the new delivery
					}
					return nil
				})
				r := consumeFrom(t, n, concurrency, handler, nil)
				id := n.publishN(1)[0]
				old := held.next(t)
				n.conn().resend(id)
				synctest.Wait()
				require.Equal(t, 1, r.Status().InFlight, "one message, whatever the deliveries")
				var again *Message
				if test.begun {
					again = held.next(t)
				}

				test.answer(old)
				close(gate)
				synctest.Wait()
				if test.saved {
					require.Equal(t, []string{"FIN " + id}, answersTo(n))
					if test.begun {
						again.Finish()
					}
					held.none(t)
					require.Equal(t, []string{"FIN " + id}, answersTo(n), "one FIN is enough")
					require.Zero(t, r.Status().InFlight)
					require.True(t, n.isFinished(id))
					return
				}
				require.Empty(t, answersTo(n))
				if again == nil {
					again = held.next(t)
				}
				require.EqualValues(t, 2, again.Attempts)
				again.Touch()
				again.Finish()
				old.Finish() // a TOUCH was no answer, but now it is too late
				synctest.Wait()
				require.Equal(t, []string{"TOUCH " + id, "FIN " + id}, answersTo(n))
				require.Zero(t, n.stats().Failed)
			})
		})
	}
}

func TestMessageComesAgainWhileItIsQueued(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		var attempts []uint16
		release := make(chan struct{})
		handler := HandlerFunc(func(m *Message) error {
			if string(m.Body) == "1" {
				<-release
				return nil
			}
			attempts = append(attempts, m.Attempts)
			return nil
		})
		r := consumeFrom(t, n, 1, handler, nil)
		ids := n.publishN(2)
		synctest.Wait()
		n.conn().resend(ids[1])
		synctest.Wait()
		n.conn().resend(ids[1])
		synctest.Wait()
		require.Equal(t, 2, r.Status().InFlight)
		close(release)
		synctest.Wait()
		require.Equal(t, []uint16{3}, attempts, "only the last delivery counts")
		require.Equal(t, []string{"FIN " + ids[0], "FIN " + ids[1]}, answersTo(n))
		require.Zero(t, n.stats().Failed)
	})
}

// The usual way to the above: a handler that takes longer than the timeout.
func TestFINAfterTheTimeoutSavesTheNextDelivery(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		runs := 0
		handler := HandlerFunc(func(m *Message) error {
			runs++
			time.Sleep(61 * time.Second)
			return nil
		})
		r := consumeFrom(t, n, 1, handler, nil)
		id := n.publishN(1)[0]
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		require.Equal(t, []string{"FIN " + id}, answersTo(n))
		require.True(t, n.isFinished(id))
		require.Equal(t, 1, runs)
		require.EqualValues(t, 2, r.Stats().MessagesReceived)
		require.EqualValues(t, 1, r.Stats().MessagesFinished)
		require.EqualValues(t, 1, r.Status().MessagesExpired)
	})
}

func TestTouchExtendsUpToTheMaximum(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.maxMsgTimeout = 150 * time.Second })
		held := make(heldMessages, 1)
		r := consumeFrom(t, n, 1, held, nil)
		id := n.publishN(1)[0]
		m := held.next(t)
		n.set(func(b *fakeBehaviour) { b.paused = true })
		time.Sleep(50 * time.Second)
		m.Touch() // until 110 s
		time.Sleep(55 * time.Second)
		synctest.Wait()
		require.Equal(t, 1, r.Status().InFlight)
		m.Touch() // until 150 s, not 165
		time.Sleep(45*time.Second - time.Nanosecond)
		synctest.Wait()
		require.Equal(t, 1, r.Status().InFlight)
		require.Equal(t, 1, n.stats().InFlight)
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.Zero(t, r.Status().InFlight)
		require.Zero(t, n.stats().InFlight)
		m.Touch()
		m.Finish()
		synctest.Wait()
		require.Equal(t, []string{"TOUCH " + id, "TOUCH " + id}, answersTo(n))
		require.EqualValues(t, 1, r.Status().MessagesExpired)
		require.EqualValues(t, 2, r.Status().LateAnswers)
	})
}

func TestTouchedMessageDoesNotExpireEarly(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		held := make(heldMessages, 2)
		r := consumeFrom(t, n, 2, held, nil)
		ids := n.publishN(2)
		touched, left := held.next(t), held.next(t)
		if touched.ID != MessageID([]byte(ids[0])) {
			touched, left = left, touched
		}
		n.set(func(b *fakeBehaviour) { b.paused = true })
		time.Sleep(30 * time.Second)
		touched.Touch()
		time.Sleep(30 * time.Second)
		synctest.Wait()
		require.Equal(t, 1, r.Status().InFlight)
		time.Sleep(20 * time.Second)
		left.Finish()
		touched.Finish()
		synctest.Wait()
		require.Equal(t, []string{"TOUCH " + ids[0], "FIN " + ids[0]}, answersTo(n))
		require.True(t, n.isFinished(ids[0]))
	})
}

// Promise 4.
func TestLateAnswersLeaveTheConnectionAlone(t *testing.T) {
	for _, code := range []string{"E_FIN_FAILED", "E_REQ_FAILED", "E_TOUCH_FAILED"} {
		for name, text := range map[string]string{
			"with nsqd's text": " FIN 00000000000000ff failed ID not in flight",
			"with other words": " something went wrong",
			"without text":     "",
		} {
			t.Run(code+" "+name, func(t *testing.T) {
				inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
					held := make(heldMessages, 10)
					r := consumeFrom(t, n, 1, held, nil)
					id := n.publishN(1)[0]
					m := held.next(t)
					c := n.conn()
					for range 100 {
						c.sendError(code + text)
					}
					synctest.Wait()
					status := r.Status()
					require.EqualValues(t, 100, status.LateAnswers)
					require.Equal(t, 1, status.InFlight)
					require.EqualValues(t, 10, status.NSQDs[0].RDY)
					m.Finish()
					n.publishN(1)
					held.next(t).Finish()
					synctest.Wait()
					require.Equal(t, []string{"IDENTIFY", "SUB t c", "RDY 10", "FIN " + id, "FIN 0000000000000002"}, c.sent())
					require.Same(t, c, n.conn())
				})
			})
		}
	}
}

// Promise 4: an error that names a message in a handler's hands is about that message.
func TestLateAnswerNamesAMessageBeingHandled(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		held := make(heldMessages, 10)
		r := consumeFrom(t, n, 1, held, nil)
		id := n.publishN(1)[0]
		m := held.next(t)
		n.set(func(b *fakeBehaviour) { b.paused = true })
		n.expire(id)
		m.Touch()
		synctest.Wait()
		require.Zero(t, r.Status().InFlight, "it is somebody else's now")
		require.EqualValues(t, 1, r.Status().LateAnswers)
		m.Finish()
		synctest.Wait()
		require.Equal(t, []string{"TOUCH " + id}, answersTo(n))
		require.EqualValues(t, 2, r.Status().LateAnswers)

		n.set(func(b *fakeBehaviour) { b.paused = false })
		held.next(t).Finish()
		synctest.Wait()
		require.True(t, n.isFinished(id))
	})
}

// Promise 4: a FIN or REQ that was refused ended an earlier delivery. If nsqd delivers the message again before its
// error is read, the new delivery is not touched by it.
func TestRefusedAnswerIsNotAboutTheNextDelivery(t *testing.T) {
	for _, command := range []string{"FIN", "REQ"} {
		t.Run(command, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				held := make(heldMessages, 10)
				r := consumeFrom(t, n, 1, held, nil)
				id := n.publishN(1)[0]
				m := held.next(t)
				n.conn().sendError("E_" + command + "_FAILED " + command + " " + id + " failed ID not in flight")
				synctest.Wait()
				require.EqualValues(t, 1, r.Status().LateAnswers)
				require.Equal(t, 1, r.Status().InFlight)
				m.Finish()
				synctest.Wait()
				require.True(t, n.isFinished(id))
			})
		})
	}
}

func TestRefusedFINsAreCounted(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.failFIN = true })
		r := consumeFrom(t, n, 4, HandlerFunc(func(*Message) error { return nil }), func(cfg *Config) { cfg.MaxAttempts = 0 })
		n.publishN(20)
		n.cluster.waitUntil(func() bool { return n.stats().Failed >= 100 })
		n.set(func(b *fakeBehaviour) { b.failFIN = false })
		synctest.Wait()
		require.Equal(t, 20, n.stats().Finished)
		require.EqualValues(t, n.stats().Failed, r.Status().LateAnswers)
		require.Equal(t, []string{"IDENTIFY", "SUB t c", "RDY 10"}, n.commands("FIN"), "RDY is left alone")
	})
}

// failingHandler fails always, and says what it was told of.
type failingHandler struct {
	runs   atomic.Int32
	failed []uint16 // attempts of messages given up
	last   func(m *Message)
}

func (h *failingHandler) HandleMessage(*Message) error {
	h.runs.Add(1)
	return errors.New("no good")
}

func (h *failingHandler) LogFailedMessage(m *Message) {
	h.failed = append(h.failed, m.Attempts)
	if h.last != nil {
		h.last(m)
	}
}

// Promise 2.
func TestMaxAttempts(t *testing.T) {
	for name, test := range map[string]struct {
		limit uint16
		last  func(m *Message)
	}{
		"one":                     {limit: 1},
		"three":                   {limit: 3},
		"the logger panics":       {limit: 2, last: func(*Message) { panic("in LogFailedMessage") }},
		"the logger answers":      {limit: 2, last: (*Message).Finish},
		"the logger says no auto": {limit: 2, last: (*Message).DisableAutoResponse},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				h := &failingHandler{last: test.last}
				r := consumeFrom(t, n, 1, h, func(cfg *Config) {
					cfg.MaxAttempts = test.limit
					cfg.DefaultRequeueDelay, cfg.MaxRequeueDelay = time.Second, time.Second
				})
				id := n.publishN(1)[0]
				time.Sleep(time.Hour)
				synctest.Wait()
				want := []string{}
				for range test.limit {
					want = append(want, "REQ "+id+" 1000")
				}
				require.Equal(t, append(want, "FIN "+id), answersTo(n))
				require.EqualValues(t, test.limit, h.runs.Load())
				require.Equal(t, []uint16{test.limit + 1}, h.failed)
				require.EqualValues(t, 1, r.Status().MessagesGivenUp)
				require.EqualValues(t, 1, r.Stats().MessagesFinished)
				require.EqualValues(t, test.limit, r.Stats().MessagesRequeued)
			})
		})
	}
}

func TestNoLimitOfAttempts(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		h := &failingHandler{}
		r := consumeFrom(t, n, 1, h, func(cfg *Config) {
			cfg.MaxAttempts = 0
			cfg.DefaultRequeueDelay = time.Second
			cfg.MaxRequeueDelay = time.Second
		})
		n.publishN(1)
		time.Sleep(99*time.Second + time.Millisecond)
		synctest.Wait()
		require.EqualValues(t, 100, h.runs.Load())
		n.conn().sendMessage("00000000000000aa", 65535, []byte("old"))
		synctest.Wait()
		require.EqualValues(t, 101, h.runs.Load())
		require.Empty(t, h.failed)
		require.Zero(t, r.Status().MessagesGivenUp)
	})
}

// deliveries that never ran count too: nsqd does the counting.
func TestMessageIsGivenUpWithoutHavingRun(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		var log syncedLines
		h := &failingHandler{}
		r := consumeFrom(t, n, 1, h, nil)
		r.SetLogger(&log, LogLevelWarning)
		n.conn().sendMessage("00000000000000aa", 6, []byte("old"))
		synctest.Wait()
		require.Zero(t, h.runs.Load())
		require.Equal(t, []uint16{6}, h.failed)
		require.Equal(t, []string{"FIN 00000000000000aa"}, answersTo(n))
		require.Contains(t, log.text(), "msg 00000000000000aa attempted 6 times, giving up (it did not fail in this process)")
	})
}

// syncedLines is a logger that keeps its lines.
type syncedLines struct {
	mu    sync.Mutex // guards lines
	lines []string
}

func (l *syncedLines) Output(_ int, s string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, s)
	return nil
}

func (l *syncedLines) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}

func TestRequeueDelayOnTheWire(t *testing.T) {
	for name, test := range map[string]struct {
		delay    time.Duration
		attempts uint16
		want     string
	}{
		"none":                                {0, 1, "0"},
		"whole milliseconds":                  {1999 * time.Microsecond, 1, "1"},
		"-1 is the default times attempts":    {-1, 3, "6000"},
		"-1 with many attempts is capped":     {-1, 500, "60000"},
		"-1 with the most attempts is capped": {-1, 65535, "60000"},
		"a little below zero":                 {-2, 1, "0"},
		"far below zero":                      {-time.Hour, 1, "0"},
		"the least of all":                    {math.MinInt64, 1, "0"},
		"an hour":                             {time.Hour, 1, "3600000"},
		"over an hour":                        {time.Hour + time.Millisecond, 1, "3600000"},
		"for ever":                            {math.MaxInt64, 1, "3600000"},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				held := make(heldMessages, 1)
				r := consumeFrom(t, n, 1, held, func(cfg *Config) {
					cfg.MaxAttempts = 0
					cfg.DefaultRequeueDelay = 2 * time.Second
					cfg.MaxRequeueDelay = time.Minute
				})
				c := n.conn()
				c.sendMessage("00000000000000aa", test.attempts, []byte("x"))
				m := held.next(t)
				n.set(func(b *fakeBehaviour) { b.paused = true })
				m.Requeue(test.delay)
				synctest.Wait()
				require.Equal(t, []string{"REQ 00000000000000aa " + test.want}, answersTo(n))
				require.Same(t, c, n.conn(), "nsqd hangs up over a minus sign")
				require.Zero(t, r.Status().InFlight)
			})
		})
	}
}

func TestDisabledAutoResponse(t *testing.T) {
	for name, result := range map[string]error{"nil": nil, "an error": errors.New("no good")} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				var got *Message
				r := consumeFrom(t, n, 1, HandlerFunc(func(m *Message) error {
					m.DisableAutoResponse()
					got = m
					return result
				}), nil)
				id := n.publishN(1)[0]
				synctest.Wait()
				require.True(t, got.IsAutoResponseDisabled())
				require.False(t, got.HasResponded())
				require.Empty(t, answersTo(n))
				require.Equal(t, 1, r.Status().InFlight, "it counts until it is answered")
				require.Zero(t, r.Status().Running)
				got.Finish()
				synctest.Wait()
				require.Equal(t, []string{"FIN " + id}, answersTo(n))
				require.Zero(t, r.Status().InFlight)
			})
		})
	}
}

func TestMessageSaysWhereItCameFrom(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		held := make(heldMessages, 1)
		consumeFrom(t, n, 1, held, nil)
		id := n.publish("hello")[0]
		m := held.next(t)
		require.Equal(t, "nsqd-1:4150", m.NSQDAddress)
		require.Equal(t, id, string(m.ID[:]))
		require.Equal(t, "hello", string(m.Body))
		require.EqualValues(t, 1, m.Attempts)
		require.Equal(t, time.Now().UnixNano(), m.Timestamp)

		// The exported fields are the user's: answers go by what came.
		m.ID, m.NSQDAddress = MessageID{}, ""
		m.Finish()
		synctest.Wait()
		require.Equal(t, []string{"FIN " + id}, answersTo(n))
	})
}
