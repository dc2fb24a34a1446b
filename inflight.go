package nsq

import (
	"encoding/binary"
	"slices"
	"weak"
)

// inFlightTable holds the deliveries of one connection that wait for their answer. It finds them by ID, since nsqd may
// send an ID again, and by deadline. The links run through the messages themselves, so that neither costs an allocation
// (BenchmarkInFlightTable). It is guarded by the mutex of its Conn.
//
// A delivery whose deadline has passed while a handler has it stays findable but no longer counts: should nsqd send the
// same ID again on this connection, a FIN for the old delivery still saves the new one from being handled twice. It is
// not kept alive for that: a message that nobody has can't be answered either.
type inFlightTable struct {
	buckets []*Message // a power of two; nil until the first message
	live    int        // messages in buckets, which are those that count as unanswered
	bytes   int64      // what they take, by delivery.size

	first, last *Message // the same, the earliest deadline first; those without one in the order they came

	overdue     []MessageID // expired ones that a handler still has, oldest first
	overdueByID map[MessageID]weak.Pointer[Message]
}

// maxOverdue bounds what is remembered of messages that handlers seem to have forgotten.
const maxOverdue = 4096

// hashMessageID spreads IDs whose last digits differ, as those of one nsqd do, over the low bits.
func hashMessageID(id *MessageID) uint64 {
	h := (binary.BigEndian.Uint64(id[:8])*0x9E3779B97F4A7C15 ^ binary.BigEndian.Uint64(id[8:])) * 0xD6E8FEB86659FD93
	return h ^ h>>32
}

// insert adds m as unanswered and returns the delivery of the same ID that it supersedes, if there is one. That one is
// no longer in the table afterwards.
func (t *inFlightTable) insert(m *Message) (superseded *Message) {
	if t.live >= len(t.buckets) {
		t.grow()
	}
	superseded = t.find(&m.delivery.id)
	if superseded != nil {
		t.remove(superseded)
	}
	b := &t.buckets[hashMessageID(&m.delivery.id)&uint64(len(t.buckets)-1)]
	m.delivery.hashNext = *b
	*b = m
	t.live++
	t.bytes += int64(m.delivery.size)
	m.delivery.listed = true
	t.linkByDeadline(m)
	return superseded
}

// find returns the delivery with this ID, nil if there is none.
func (t *inFlightTable) find(id *MessageID) *Message {
	if t.live > 0 {
		m := t.buckets[hashMessageID(id)&uint64(len(t.buckets)-1)]
		for m != nil && m.delivery.id != *id {
			m = m.delivery.hashNext
		}
		if m != nil {
			return m
		}
	}
	if len(t.overdue) == 0 {
		return nil
	}
	return t.overdueByID[*id].Value()
}

// holds tells whether this very delivery is in the table, be it overdue.
func (t *inFlightTable) holds(m *Message) bool { return t.find(&m.delivery.id) == m }

// remove takes out m, which must be in the table.
func (t *inFlightTable) remove(m *Message) {
	if !m.delivery.listed {
		t.forgetOverdue(m.delivery.id)
		return
	}
	p := &t.buckets[hashMessageID(&m.delivery.id)&uint64(len(t.buckets)-1)]
	for *p != m {
		p = &(*p).delivery.hashNext
	}
	*p = m.delivery.hashNext
	m.delivery.hashNext = nil
	m.delivery.listed = false
	t.live--
	t.bytes -= int64(m.delivery.size)
	t.unlinkByDeadline(m)
}

// expire takes the next live message whose deadline is not after now out of the count. It returns nil when there is
// none. A message that a handler has stays findable.
func (t *inFlightTable) expire(now int64) *Message {
	m := t.first
	if m == nil || later(m.delivery.deadline, now) {
		return nil
	}
	t.remove(m)
	if m.delivery.state.drop() {
		return m
	}
	t.forgetOverdue(m.delivery.id) // of one that nobody has any more
	if len(t.overdue) == maxOverdue {
		t.forgetOverdue(t.overdue[0])
	}
	if t.overdueByID == nil {
		t.overdueByID = make(map[MessageID]weak.Pointer[Message])
	}
	t.overdue = append(t.overdue, m.delivery.id)
	t.overdueByID[m.delivery.id] = weak.Make(m)
	return m
}

// dropOldest takes queued messages out, those first whose deadline is the earliest, until they have made up for so many
// bytes. It returns how many.
func (t *inFlightTable) dropOldest(bytes int64) (n int) {
	for m := t.first; m != nil && bytes > 0; {
		next := m.delivery.next
		if m.delivery.state.drop() {
			t.remove(m)
			m.Body = nil
			bytes -= int64(m.delivery.size)
			n++
		}
		m = next
	}
	return n
}

// nextDeadline returns when the next message expires, 0 if none does.
func (t *inFlightTable) nextDeadline() int64 {
	if t.first == nil {
		return 0
	}
	return t.first.delivery.deadline
}

// postpone gives a live message a later deadline.
func (t *inFlightTable) postpone(m *Message, deadline int64) {
	t.unlinkByDeadline(m)
	m.delivery.deadline = deadline
	t.linkByDeadline(m)
}

// clear empties the table and hands each message to f.
func (t *inFlightTable) clear(f func(m *Message)) {
	for i := range t.buckets {
		for m := t.buckets[i]; m != nil; {
			next := m.delivery.hashNext
			m.delivery.hashNext, m.delivery.prev, m.delivery.next, m.delivery.listed = nil, nil, nil, false
			f(m)
			m = next
		}
	}
	for _, id := range t.overdue {
		if m := t.overdueByID[id].Value(); m != nil {
			f(m)
		}
	}
	*t = inFlightTable{}
}

// queued returns the messages that wait for a handler.
func (t *inFlightTable) queued() []*Message {
	var ms []*Message
	for _, m := range t.buckets {
		for ; m != nil; m = m.delivery.hashNext {
			if m.delivery.state.queued() {
				ms = append(ms, m)
			}
		}
	}
	return ms
}

func (t *inFlightTable) forgetOverdue(id MessageID) {
	if _, ok := t.overdueByID[id]; ok {
		delete(t.overdueByID, id)
		i := slices.Index(t.overdue, id)
		t.overdue = slices.Delete(t.overdue, i, i+1)
	}
}

// linkByDeadline puts m in its place. New messages and touched ones have the latest deadline but for rare exceptions,
// so the search begins at the end.
func (t *inFlightTable) linkByDeadline(m *Message) {
	after := t.last
	for after != nil && later(after.delivery.deadline, m.delivery.deadline) {
		after = after.delivery.prev
	}
	m.delivery.prev = after
	if after == nil {
		m.delivery.next = t.first
		t.first = m
	} else {
		m.delivery.next = after.delivery.next
		after.delivery.next = m
	}
	if m.delivery.next == nil {
		t.last = m
	} else {
		m.delivery.next.delivery.prev = m
	}
}

// later compares deadlines; 0 is none, and after all others.
func later(a, b int64) bool { return b != 0 && (a == 0 || a > b) }

func (t *inFlightTable) unlinkByDeadline(m *Message) {
	if m.delivery.prev == nil {
		t.first = m.delivery.next
	} else {
		m.delivery.prev.delivery.next = m.delivery.next
	}
	if m.delivery.next == nil {
		t.last = m.delivery.prev
	} else {
		m.delivery.next.delivery.prev = m.delivery.prev
	}
	m.delivery.prev, m.delivery.next = nil, nil
}

// grow doubles the buckets, from 16 on: an idle connection has none.
func (t *inFlightTable) grow() {
	old := t.buckets
	t.buckets = make([]*Message, max(16, 2*len(old)))
	for _, m := range old {
		for m != nil {
			next := m.delivery.hashNext
			b := &t.buckets[hashMessageID(&m.delivery.id)&uint64(len(t.buckets)-1)]
			m.delivery.hashNext = *b
			*b = m
			m = next
		}
	}
}
