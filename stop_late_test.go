package nsq

import (
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A stop that runs out of time while messages stream in and every handler is stuck: it says so, nothing is answered
// later, and nothing panics when the handlers return at last.
func TestStopRunsOutOfTimeInTheMiddleOfAStream(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.msgTimeout, b.stragglers, b.readDelay = 2*time.Second, 2, 5*time.Millisecond })
		var log syncedLines
		var returned atomic.Int32
		release := make(chan struct{})
		r := newTestConsumer(t, n.cluster, func(cfg *Config) {
			cfg.MaxInFlight = 1200 // beyond what the channel of the inbox holds
			cfg.ShutdownTimeout = 3 * time.Second
		})
		r.SetLogger(&log, LogLevelWarning)
		r.AddConcurrentHandlers(HandlerFunc(func(m *Message) error {
			<-release
			returned.Add(1)
			switch m.ID[15] % 3 {
			case 0:
				return errors.New("too late")
			case 1:
				panic("too late")
			}
			return nil
		}), 30)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.publishN(1500)
		n.flood(5 * time.Millisecond)
		time.Sleep(500 * time.Millisecond)
		begin := time.Now()
		r.Stop()
		<-r.StopChan
		require.LessOrEqual(t, time.Since(begin), 3*time.Second)
		require.Contains(t, log.text(), "30 handlers running")
		n.stopFlood()
		before := answersTo(n)
		close(release)
		time.Sleep(time.Minute)
		synctest.Wait()
		require.EqualValues(t, 30, returned.Load())
		require.Equal(t, before, answersTo(n))
		for _, answer := range before {
			require.Regexp(t, `^REQ \w+ 0$`, answer, "only what no handler had")
		}
		stats := n.stats()
		require.Equal(t, stats.Published, stats.Depth+stats.InFlight, "nothing is lost")
		require.Zero(t, n.cluster.openConns())
	})
}

// Failures in a consumer that stops are answered like any: REQ, no RDY, and backoff holds nothing up.
func TestHandlersThatFailWhileStopping(t *testing.T) {
	for name, level := range map[string]int{"out of backoff": 0, "in backoff": 1} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				r := consumeFrom(t, n, 4, HandlerFunc(func(m *Message) error {
					if string(m.Body) != "bad" {
						time.Sleep(10 * time.Second)
					}
					return errors.New("no good")
				}), func(cfg *Config) { cfg.MaxBackoffDuration = time.Minute })
				ids := n.publishN(3)
				synctest.Wait()
				n.set(func(b *fakeBehaviour) { b.paused = true })
				if level > 0 {
					n.conn().sendMessage("00000000000000aa", 1, []byte("bad"))
					synctest.Wait()
				}
				require.Equal(t, level, r.Status().BackoffLevel)
				r.Stop()
				begin := time.Now()
				<-r.StopChan
				require.Less(t, time.Since(begin), 10*time.Second+stragglersBusy+hangUpBusy)
				lines := n.commands("IDENTIFY", "SUB", "NOP")
				at := slices.Index(lines, "CLS")
				require.Positive(t, at)
				slices.Sort(lines[at+1:])
				require.Equal(t, []string{"REQ " + ids[0] + " 0", "REQ " + ids[1] + " 0", "REQ " + ids[2] + " 0"}, lines[at+1:])
				require.Zero(t, n.stats().InFlight)
			})
		})
	}
}

// Stop behind a DisconnectFromNSQD that still waits for a handler: one CLS, the handler's FIN, one end.
func TestStopBehindADisconnect(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		held := make(heldMessages, 1)
		r := consumeFrom(t, n, 1, held, nil)
		id := n.publishN(1)[0]
		m := held.next(t)
		require.NoError(t, r.DisconnectFromNSQD(n.addr))
		require.ErrorIs(t, r.DisconnectFromNSQD(n.addr), ErrNotConnected)
		time.Sleep(time.Second)
		r.Stop()
		r.Stop()
		time.Sleep(10 * time.Second)
		require.False(t, isFakeClosed(asStruct(r.StopChan)), "the message is waited for")
		m.Finish()
		<-r.StopChan
		r.Stop()
		time.Sleep(2 * r.config.ShutdownTimeout)
		require.Equal(t, []string{"IDENTIFY", "SUB t c", "RDY 10", "CLS", "FIN " + id}, n.commands())
		require.True(t, n.isFinished(id))
		require.Zero(t, n.cluster.openConns())
	})
}
