package nsq

import (
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// handlerOfBoth is a handler with a word about messages that are given up.
type handlerOfBoth struct {
	handle, giveUp func(m *Message) error
}

func (h handlerOfBoth) HandleMessage(m *Message) error { return h.handle(m) }
func (h handlerOfBoth) LogFailedMessage(m *Message)    { _ = h.giveUp(m) }

// What makes a consumer back off is a failure that was not answered otherwise, and nothing else. What does not leaves RDY
// alone. A step costs all messages the pause, and one success ends it.
func TestWhatCausesBackoff(t *testing.T) {
	fails := func(m *Message) error { return errRDYTest }
	tests := map[string]struct {
		handle   func(m *Message) error
		giveUp   func(m *Message) error
		attempts uint16 // of the message; 0 is 1
		nsqd     func(n *fakeNSQD)
		level    int
	}{
		"an error":                         {handle: fails, level: 1},
		"a panic":                          {handle: func(*Message) error { panic("boom") }, level: 1},
		"Goexit":                           {handle: func(*Message) error { runtime.Goexit(); return nil }, level: 1},
		"Requeue":                          {handle: func(m *Message) error { m.Requeue(time.Hour); return nil }, level: 1},
		"Requeue, and an error":            {handle: func(m *Message) error { m.Requeue(time.Hour); return errRDYTest }, level: 1},
		"Requeue of a message left to us":  {handle: func(m *Message) error { m.DisableAutoResponse(); m.Requeue(0); return nil }, level: 1},
		"success":                          {handle: finishAll},
		"RequeueWithoutBackoff":            {handle: func(m *Message) error { m.RequeueWithoutBackoff(time.Hour); return nil }},
		"RequeueWithoutBackoff, and error": {handle: func(m *Message) error { m.RequeueWithoutBackoff(time.Hour); return errRDYTest }},
		"Finish, and an error":             {handle: func(m *Message) error { m.Finish(); return errRDYTest }},
		"Finish, and a panic":              {handle: func(m *Message) error { m.Finish(); panic("boom") }},
		"Finish, then Requeue":             {handle: func(m *Message) error { m.Finish(); m.Requeue(0); return nil }},
		"an error about a message left to us": {handle: func(m *Message) error {
			m.DisableAutoResponse()
			return errRDYTest
		}},
		"a message that is given up":         {handle: fails, giveUp: fails, attempts: 6},
		"a panic about one that is given up": {handle: fails, giveUp: func(*Message) error { panic("boom") }, attempts: 6},
		"a timeout":                          {handle: func(m *Message) error { time.Sleep(5 * time.Minute); return nil }},
		"FIN is refused": {
			handle: finishAll, nsqd: func(n *fakeNSQD) {
				n.set(func(b *fakeBehaviour) {
					b.onCommand = func(c *fakeConn, line string, _ []byte) bool {
						if line[:3] != "FIN" {
							return false
						}
						c.sendError("E_FIN_FAILED " + line + " failed ID not in flight")
						return true
					}
				})
			},
		},
		"nsqd's loss of the connection": {
			handle: func(*Message) error { time.Sleep(time.Second); return nil },
			nsqd:   func(n *fakeNSQD) { time.AfterFunc(500*time.Millisecond, n.dropAll) },
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			inRDYBubble(t, 1, 5, nil, func(t *testing.T, g *rdyRig) {
				n := g.nodes[0]
				first := true
				handle := func(m *Message) error {
					if !first {
						return nil
					}
					first = false
					return tt.handle(m)
				}
				g.r.AddHandler(handlerOfBoth{handle, tt.giveUp})
				g.connect()
				if tt.nsqd != nil {
					tt.nsqd(n)
				}
				n.conn().sendMessage("00000000000000aa", max(tt.attempts, 1), []byte("x"))
				synctest.Wait()
				require.Equal(t, tt.level, g.r.Status().BackoffLevel)
				if tt.level == 0 {
					time.Sleep(6 * time.Minute)
					for _, line := range g.rdyCommands() {
						require.Equal(t, "RDY 5", line)
					}
					return
				}
				require.Zero(t, n.conn().currentRDY())
				n.publishN(3)
				time.Sleep(2*time.Second - time.Nanosecond)
				synctest.Wait()
				require.Zero(t, n.stats().Finished, "all messages wait")
				time.Sleep(time.Nanosecond)
				synctest.Wait()
				require.Zero(t, g.r.Status().BackoffLevel, "the first success ends it")
				require.Equal(t, []int64{5}, g.rdy())
				require.GreaterOrEqual(t, n.stats().Finished, 3)
			})
		})
	}
}
