package soak

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/stretchr/testify/require"
)

// memoryJournal keeps the violations, and how connections were closed.
type memoryJournal struct {
	violations []string
	closed     []event
}

func (j *memoryJournal) write(e event) {
	if e.kind == eventClosed {
		j.closed = append(j.closed, e)
	}
	if e.kind == eventViolation {
		j.violations = append(j.violations, e.text)
	}
}

// tapBench feeds a tap as its sockets would.
type tapBench struct {
	*tap
	journal *memoryJournal
}

func newTapBench(maxInFlight int) *tapBench {
	j := &memoryJournal{}
	return &tapBench{newTap(j, msgTimeout, maxInFlight), j}
}

func (b *tapBench) conn() *tapConn {
	c := b.add(nil, "nsqd")
	b.send(c, "  V2IDENTIFY\n\x00\x00\x00\x02{}SUB t c\n")
	return c
}

// send is a write that succeeds.
func (b *tapBench) send(c *tapConn, text string) {
	b.sendSlowly(c, text, func() {})
}

// sendSlowly is a write during which something else happens.
func (b *tapBench) sendSlowly(c *tapConn, text string, meanwhile func()) {
	c.out = append(c.out, text...)
	commands := c.takeCommands()
	for _, cmd := range commands {
		c.before(cmd, time.Now())
	}
	c.writing, c.arrived = true, 0
	meanwhile()
	c.writing = false
	for _, cmd := range commands {
		c.after(cmd)
	}
}

func (b *tapBench) receive(c *tapConn, kind int32, data []byte) {
	frame := binary.BigEndian.AppendUint32(nil, uint32(4+len(data)))
	frame = binary.BigEndian.AppendUint32(frame, uint32(kind))
	frame = append(frame, data...)
	for _, x := range frame { // at the worst segmentation
		c.in = append(c.in, x)
		c.takeFrames(time.Now())
	}
}

// message delivers a message and returns its ID.
func (b *tapBench) message(c *tapConn, number int, attempts uint16) string {
	m := nsq.NewMessage(b.id(number), body(number))
	m.Attempts = attempts
	var data strings.Builder
	if _, err := m.WriteTo(&data); err != nil {
		panic(err)
	}
	b.receive(c, nsq.FrameTypeMessage, []byte(data.String()))
	return string(m.ID[:])
}

func (b *tapBench) id(number int) nsq.MessageID {
	return nsq.MessageID([]byte(fmt.Sprintf("%016x", number)))
}

// begun has a handler begin a message.
func (b *tapBench) begun(number int, attempts uint16) *delivery {
	m := nsq.NewMessage(b.id(number), body(number))
	m.Attempts, m.NSQDAddress = attempts, "nsqd"
	return b.begin(m)
}

// age lets everything have happened earlier.
func (b *tapBench) age(d time.Duration) {
	for _, s := range b.suspects {
		s.at = s.at.Add(-d)
	}
	for i := range b.limits {
		b.limits[i].since = b.limits[i].since.Add(-d)
	}
	for c := range b.conns {
		for i := range c.highest {
			c.highest[i].since = c.highest[i].since.Add(-d)
		}
		for _, e := range c.unanswered {
			e.read, e.ended, e.deadline = e.read.Add(-d), e.ended.Add(-d), e.deadline.Add(-d)
		}
	}
	for _, c := range b.closed {
		c.closedAt = c.closedAt.Add(-d)
	}
}

// TestTapSees: what must not be is reported, and what may be is not.
func TestTapSees(t *testing.T) {
	cases := map[string]struct {
		do   func(b *tapBench)
		want string // in the one violation; empty: none
	}{
		"a message is handled and finished": {do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 1\n")
			id := b.message(c, 7, 1)
			b.end(b.begun(7, 1), finished)
			b.send(c, "FIN "+id+"\n")
		}},
		"FIN without a handler": {want: "which no handler has finished", do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 1\n")
			b.send(c, "FIN "+b.message(c, 7, 1)+"\n")
		}},
		"FIN while the handler is at work": {want: "which no handler has finished", do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 1\n")
			id := b.message(c, 7, 1)
			b.begun(7, 1)
			b.send(c, "FIN "+id+"\n")
		}},
		"FIN of a message that is to be requeued": {want: "which no handler has finished", do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 1\n")
			id := b.message(c, 7, 1)
			b.end(b.begun(7, 1), requeued)
			b.send(c, "FIN "+id+"\n")
		}},
		"REQ of a finished message": {want: "which a handler has finished", do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 1\n")
			id := b.message(c, 7, 1)
			b.end(b.begun(7, 1), finished)
			b.send(c, "REQ "+id+" 0\n")
		}},
		"REQ of a message that no handler has": {do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 1\n")
			b.send(c, "REQ "+b.message(c, 7, 1)+" 0\n")
		}},
		"REQ of a message that a handler has": {want: "which a handler has", do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 1\n")
			id := b.message(c, 7, 1)
			b.begun(7, 1)
			b.send(c, "REQ "+id+" 0\n")
		}},
		"a second answer": {want: "answers nothing that came over this connection", do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 1\n")
			id := b.message(c, 7, 1)
			b.end(b.begun(7, 1), finished)
			b.send(c, "FIN "+id+"\n")
			b.send(c, "FIN "+id+"\n")
		}},
		"an answer on another connection": {want: "answers nothing that came over this connection", do: func(b *tapBench) {
			c, other := b.conn(), b.conn()
			b.send(c, "RDY 1\n")
			id := b.message(c, 7, 1)
			b.end(b.begun(7, 1), finished)
			b.send(other, "FIN "+id+"\n")
		}},
		"a message comes again before its REQ has been written": {do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 1\n")
			id := b.message(c, 7, 1)
			b.end(b.begun(7, 1), requeued)
			b.sendSlowly(c, "REQ "+id+" 0\n", func() { b.message(c, 7, 2) })
			b.end(b.begun(7, 2), finished)
			b.send(c, "FIN "+id+"\n")
		}},
		"the handler of an earlier delivery finishes the message": {do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 2\n")
			id := b.message(c, 7, 1)
			d := b.begun(7, 1)
			b.message(c, 7, 2)
			b.end(d, finished)
			b.send(c, "FIN "+id+"\n")
		}},
		"an answer is never written": {want: "was never written", do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 1\n")
			b.message(c, 7, 1)
			d := b.begun(7, 1)
			d.deadline = d.deadline.Add(time.Minute)
			b.end(d, finished)
			b.age(written + 1)
		}},
		"a handler begins an answered message": {want: "never came or was answered already", do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 1\n")
			b.send(c, "REQ "+b.message(c, 7, 1)+" 0\n")
			b.begun(7, 1)
		}},
		"two handlers begin a message": {want: "a second handler has", do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 1\n")
			b.message(c, 7, 1)
			b.begun(7, 1)
			b.begun(7, 1)
		}},
		"a handler begins an expired message": {want: "which has expired", do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 1\n")
			b.message(c, 7, 1)
			b.age(msgTimeout + noticed + 1)
			b.begun(7, 1)
		}},
		"a handler begins a message of a lost connection": {want: "whose connection was closed", do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 1\n")
			b.message(c, 7, 1)
			b.closeConn(c)
			b.age(noticed + 1)
			b.begun(7, 1)
		}},
		"nsqd complains of a command": {want: "E_INVALID", do: func(b *tapBench) {
			b.receive(b.conn(), nsq.FrameTypeError, []byte("E_INVALID RDY count 2501 out of range 0-2500"))
		}},
		"nsqd complains of a late answer": {do: func(b *tapBench) {
			b.receive(b.conn(), nsq.FrameTypeError, []byte("E_FIN_FAILED FIN 0000000000000007 failed ID not in flight"))
		}},
		"the budget is used up": {do: func(b *tapBench) {
			c, other := b.conn(), b.conn()
			b.send(c, "RDY 6\n")
			b.send(other, "RDY 4\n")
			b.age(noticed + 1)
		}},
		"RDY beyond the budget": {want: "beyond the max-in-flight", do: func(b *tapBench) {
			c, other := b.conn(), b.conn()
			b.send(c, "RDY 6\n")
			b.send(other, "RDY 5\n")
			b.age(noticed + 1)
			b.send(other, "RDY 4\n") // too late
		}},
		"a raise before the lowering that pays for it": {want: "beyond the max-in-flight", do: func(b *tapBench) {
			c, other := b.conn(), b.conn()
			b.send(c, "RDY 10\n")
			b.sendSlowly(c, "RDY 5\n", func() { b.send(other, "RDY 5\n") })
			b.age(noticed + 1)
		}},
		"a raise while messages beyond a lowered RDY are unanswered": {want: "beyond the max-in-flight", do: func(b *tapBench) {
			c, other := b.conn(), b.conn()
			b.send(c, "RDY 10\n")
			for i := range 8 {
				b.message(c, i, 1)
			}
			b.send(c, "RDY 5\n")
			b.send(other, "RDY 5\n")
			b.age(noticed + 1)
		}},
		"a raise while answers are being written": {want: "beyond the max-in-flight", do: func(b *tapBench) {
			c, other := b.conn(), b.conn()
			b.send(c, "RDY 5\n")
			for i := range 5 {
				b.message(c, i, 1)
			}
			b.end(b.begun(0, 1), finished)
			b.send(c, "RDY 4\n")
			b.sendSlowly(c, "FIN 0000000000000000\n", func() { b.send(other, "RDY 6\n") })
			b.age(noticed + 1)
		}},
		"a raise when an answer that is being written has brought the next message": {do: func(b *tapBench) {
			c, other := b.conn(), b.conn()
			b.send(c, "RDY 5\n")
			for i := range 5 {
				b.message(c, i, 1)
			}
			b.end(b.begun(0, 1), finished)
			b.sendSlowly(c, "FIN 0000000000000000\n", func() {
				b.message(c, 5, 1)
				b.send(other, "RDY 5\n")
			})
			b.age(noticed + 1)
		}},
		"a raise for the budget of a connection that is just being lost": {do: func(b *tapBench) {
			c, other := b.conn(), b.conn()
			b.send(c, "RDY 10\n")
			b.send(other, "RDY 10\n")
			b.closeConn(c)
			b.age(noticed + 1)
		}},
		"a raise for the budget of expired messages": {do: func(b *tapBench) {
			c, other := b.conn(), b.conn()
			b.send(c, "RDY 10\n")
			for i := range 10 {
				b.message(c, i, 1)
			}
			b.age(msgTimeout)
			b.send(c, "RDY 0\n")
			b.send(other, "RDY 10\n")
			b.age(noticed + 1)
		}},
		"a message more than RDY was ever": {want: "RDY was never above", do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 2\n")
			for i := range 4 {
				b.message(c, i, 1)
			}
		}},
		"RDY stays when the limit falls": {want: "and max-in-flight is 3", do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 10\n")
			b.setLimit(3)
			b.age(noticed + 1)
		}},
		"RDY follows when the limit falls": {do: func(b *tapBench) {
			c := b.conn()
			b.send(c, "RDY 10\n")
			b.setLimit(3)
			b.send(c, "RDY 3\n")
			b.age(noticed + 1)
		}},
	}
	for name, test := range cases {
		t.Run(name, func(t *testing.T) {
			b := newTapBench(10)
			test.do(b)
			b.sweep()
			if test.want == "" {
				require.Empty(t, b.journal.violations)
				return
			}
			require.Len(t, b.journal.violations, 1)
			require.Contains(t, b.journal.violations[0], test.want)
		})
	}
}

// TestTapCountsWhatIsForgotten: a connection that is closed in order answers all that came in time.
func TestTapCountsWhatIsForgotten(t *testing.T) {
	b := newTapBench(10)
	c, other := b.conn(), b.conn()
	for i, conn := range []*tapConn{c, other} {
		b.send(conn, "RDY 5\n")
		b.send(conn, "REQ "+b.message(conn, 10*i, 1)+" 0\n")
		b.message(conn, 10*i+1, 1)
		b.message(conn, 10*i+2, 1)
	}
	b.age(time.Second)
	b.message(c, 3, 1)
	b.send(c, "CLS\n")
	c.hungUp = time.Now()
	b.closeConn(c)
	b.closeConn(other)
	require.Len(t, b.journal.closed, 2)
	require.Equal(t, "closed", b.journal.closed[0].text)
	require.Equal(t, 2, b.journal.closed[0].number, "the third came at the last moment")
	require.Equal(t, "lost", b.journal.closed[1].text)
	require.Zero(t, b.journal.closed[1].number)
}

// What the machine did not let the library do in time is not held against it; what came in good time is.
func TestTapReckonsWithATimeOfStandstill(t *testing.T) {
	tp := newTap(nil, time.Second, 1)
	require.Equal(t, noticed, tp.noticed())
	tp.tick()
	tp.ticked = tp.ticked.Add(-3 * time.Second)
	require.Greater(t, tp.noticed(), noticed+2*time.Second, "before the tick that tells")
	tp.tick()
	require.Greater(t, tp.noticed(), noticed+2*time.Second)
	for range 100 {
		tp.ticked = tp.ticked.Add(-tickEvery)
		tp.tick()
	}
	require.Greater(t, tp.noticed(), noticed+2*time.Second, "what began before is still to be seen")
	for range 2000 {
		tp.ticked = tp.ticked.Add(-tickEvery)
		tp.tick()
	}
	require.Less(t, tp.noticed(), noticed+tickEvery)
}
