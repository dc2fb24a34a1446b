package nsq

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A FIN leaves at once, and if a write is under way, with the next one, whatever else is to be sent. The clock is the
// bubble's: it moves only if somebody waits for it, so any timer in the way of an answer shows, and nothing else does.
func TestAFINLeavesWithTheNextWrite(t *testing.T) {
	messages := 2500
	if raceDetector { // the number has nothing to do with races, and takes long
		messages = 250
	}
	const slow = 50 * time.Millisecond // what a write takes
	for name, pending := range map[string]func(n *fakeNSQD, r *Consumer, others []*Message){
		"nothing else": func(*fakeNSQD, *Consumer, []*Message) {},
		"other answers": func(_ *fakeNSQD, _ *Consumer, others []*Message) {
			for i, m := range others {
				if i%2 == 0 {
					m.Finish()
				} else {
					m.Requeue(time.Hour)
				}
			}
		},
		"TOUCHes": func(_ *fakeNSQD, _ *Consumer, others []*Message) {
			for _, m := range others {
				m.Touch()
			}
		},
		"a lower RDY":               func(_ *fakeNSQD, r *Consumer, _ []*Message) { r.ChangeMaxInFlight(10) },
		"a pause":                   func(_ *fakeNSQD, r *Consumer, _ []*Message) { r.ChangeMaxInFlight(0) },
		"the answer to a heartbeat": func(n *fakeNSQD, _ *Consumer, _ []*Message) { n.conn().sendHeartbeat() },
		"a backoff that has just begun": func(_ *fakeNSQD, _ *Consumer, others []*Message) {
			others[0].Requeue(time.Hour)
		},
	} {
		// hold has all messages held by handlers, and hands out the last one apart.
		hold := func(t *testing.T, n *fakeNSQD) (r *Consumer, others []*Message, last *Message) {
			held := make(heldMessages, messages)
			r = consumeFrom(t, n, 4, held, func(cfg *Config) {
				cfg.MaxInFlight = messages
				cfg.MaxBackoffDuration = time.Minute
			})
			n.publishN(messages)
			for range messages - 1 {
				others = append(others, held.next(t))
			}
			last = held.next(t)
			synctest.Wait()
			return r, others, last
		}
		finished := func(n *fakeNSQD, m *Message) []fakeEntry {
			synctest.Wait()
			return n.cluster.snapshot(byKind(entryCommand), byLine("FIN "+string(m.ID[:])))
		}
		t.Run("no write is under way, and there is to be sent "+name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				r, others, last := hold(t, n)
				start := time.Now()
				pending(n, r, others)
				last.Finish()
				fin := finished(n, last)
				require.Len(t, fin, 1)
				require.Zero(t, fin[0].At.Sub(start))
			})
		})
		t.Run("a write is under way, and there is to be sent "+name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				n.set(func(b *fakeBehaviour) { b.socketBuffer = 0 }) // a write lasts until it is read
				r, others, last := hold(t, n)
				n.stopReadingFor(slow)
				before, start := n.conn().clientWrites(), time.Now()
				others[len(others)-1].Finish()
				synctest.Wait()
				require.Equal(t, 1, n.conn().clientWrites()-before, "the write that is under way")
				pending(n, r, others[:len(others)-1])
				last.Finish()
				require.Empty(t, finished(n, last))
				time.Sleep(slow)
				fin := finished(n, last)
				require.Len(t, fin, 1)
				require.Equal(t, slow, fin[0].At.Sub(start))
				require.Equal(t, 2, n.conn().clientWrites()-before, "the next write brings all that is pending")
			})
		})
	}
}
