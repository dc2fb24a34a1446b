package nsq

import (
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// An answer that comes too late is counted and logged with the message it was for, whether the consumer knew or nsqd
// had to tell.
func TestLateAnswersAreToldWithTheirMessage(t *testing.T) {
	for name, answer := range map[string]func(m *Message){
		"FIN":                 (*Message).Finish,
		"REQ":                 func(m *Message) { m.Requeue(0) },
		"REQ without backoff": func(m *Message) { m.RequeueWithoutBackoff(0) },
		"TOUCH":               (*Message).Touch,
	} {
		for who, expired := range map[string]bool{"by the consumer": true, "by nsqd": false} {
			t.Run(name+" "+who, func(t *testing.T) {
				inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
					n.set(func(b *fakeBehaviour) { b.paused = true })
					var log syncedLines
					held := make(heldMessages, 1)
					r := consumeFrom(t, n, 1, held, func(cfg *Config) { cfg.MaxBackoffDuration = time.Minute })
					r.SetLogger(&log, LogLevelWarning)
					n.set(func(b *fakeBehaviour) { b.paused = false })
					id := n.publishN(1)[0]
					m := held.next(t)
					n.set(func(b *fakeBehaviour) { b.paused = true })
					if expired {
						time.Sleep(2 * time.Minute)
					} else {
						n.expire(id)
					}
					answer(m)
					synctest.Wait()
					require.EqualValues(t, 1, r.Status().LateAnswers)
					require.Contains(t, log.text(), id)
					require.Equal(t, !expired, len(answersTo(n)) == 1)
					require.Zero(t, r.Status().InFlight)
				})
			})
		}
	}
}

// A program that answers all it holds, after its connection was lost and made again: nothing of it goes out, and the log is not flooded.
func TestManyAnswersToALostConnection(t *testing.T) {
	const messages = 300
	for name, answer := range map[string]func(m *Message){
		"FIN":   (*Message).Finish,
		"REQ":   func(m *Message) { m.Requeue(0) },
		"TOUCH": (*Message).Touch,
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				held := make(heldMessages, 2*messages)
				var log syncedLines
				r := consumeFrom(t, n, 10, held, func(cfg *Config) {
					cfg.MaxInFlight = messages
					cfg.MaxBackoffDuration = time.Minute
				})
				r.SetLogger(&log, LogLevelWarning)
				n.publishN(messages)
				var ms []*Message
				for range messages {
					ms = append(ms, held.next(t))
				}
				n.dropAll()
				n.waitSubscribed()
				var answering sync.WaitGroup
				for _, m := range ms {
					answering.Go(func() { answer(m) })
				}
				answering.Wait()
				synctest.Wait()
				require.Empty(t, answersTo(n))
				require.EqualValues(t, messages, r.Status().LateAnswers)
				require.LessOrEqual(t, strings.Count(log.text(), "\n"), 6, log.text())
				n.expire()
				for range messages {
					held.next(t).Finish()
				}
				synctest.Wait()
				require.Equal(t, messages, n.stats().Finished, "all have come again")
			})
		})
	}
}

// The answer that ends backoff may come when there is no connection left.
func TestBackoffEndsWithoutAConnection(t *testing.T) {
	inRDYBubble(t, 1, 5, nil, func(t *testing.T, g *rdyRig) {
		g.r.AddHandler(HandlerFunc(g.hold))
		g.nodes[0].publish("x")
		g.connect()
		g.take()[0].Requeue(0)
		time.Sleep(2 * time.Second)
		probe := g.take()
		require.Len(t, probe, 1)
		require.True(t, g.r.Status().BackoffProbing)
		g.nodes[0].down()
		synctest.Wait()
		g.r.ChangeMaxInFlight(7)
		probe[0].Finish()
		synctest.Wait()
		g.nodes[0].up()
		g.nodes[0].expire()
		g.waitUntil(func() bool { return g.nodes[0].stats().InFlight == 1 })
		g.take()[0].Finish()
		require.Equal(t, []int64{7}, g.rdy())
		require.Zero(t, g.r.Status().BackoffLevel)
	})
}
