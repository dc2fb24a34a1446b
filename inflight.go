package nsq

import "encoding/binary"

// inFlightTable holds the deliveries of one connection that wait for their answer. It finds them by ID, since nsqd may
// send an ID again, and by deadline. The links run through the messages themselves, so that neither costs an allocation
// (BenchmarkInFlightTable). It is guarded by the mutex of its Conn.
//
// A delivery whose deadline has passed while a handler has it stays findable but no longer counts: should nsqd send the
// same ID again on this connection, a FIN for the old delivery still saves the new one from being handled twice.
type inFlightTable struct {
	buckets []*Message // a power of two; nil until the first message
	entries int        // messages in buckets
	live    int        // those of them that count as unanswered

	first, last *Message // live ones with a deadline, the earliest first

	overdue []*Message // expired ones that a handler still has, oldest first
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
	if t.entries >= len(t.buckets) {
		t.grow()
	}
	superseded = t.find(&m.delivery.id)
	if superseded != nil {
		t.remove(superseded)
	}
	b := &t.buckets[hashMessageID(&m.delivery.id)&uint64(len(t.buckets)-1)]
	m.delivery.hashNext = *b
	*b = m
	t.entries++
	t.live++
	m.delivery.listed = true
	t.linkByDeadline(m)
	return superseded
}

// find returns the delivery with this ID, nil if there is none.
func (t *inFlightTable) find(id *MessageID) *Message {
	if t.entries == 0 {
		return nil
	}
	m := t.buckets[hashMessageID(id)&uint64(len(t.buckets)-1)]
	for m != nil && m.delivery.id != *id {
		m = m.delivery.hashNext
	}
	return m
}

// holds tells whether this very delivery is in the table, be it overdue.
func (t *inFlightTable) holds(m *Message) bool { return t.find(&m.delivery.id) == m }

// remove takes out m, which must be in the table.
func (t *inFlightTable) remove(m *Message) {
	p := &t.buckets[hashMessageID(&m.delivery.id)&uint64(len(t.buckets)-1)]
	for *p != m {
		p = &(*p).delivery.hashNext
	}
	*p = m.delivery.hashNext
	m.delivery.hashNext = nil
	t.entries--
	if m.delivery.listed {
		t.unlist(m)
	} else {
		t.forgetOverdue(m)
	}
}

// unlist makes m count as answered.
func (t *inFlightTable) unlist(m *Message) {
	m.delivery.listed = false
	t.live--
	t.unlinkByDeadline(m)
}

// expire takes the next live message whose deadline is not after now out of the count. It returns nil when there is
// none. A message that a handler has stays findable.
func (t *inFlightTable) expire(now int64) *Message {
	m := t.first
	if m == nil || m.delivery.deadline > now {
		return nil
	}
	if m.delivery.state.drop() {
		t.remove(m)
		return m
	}
	t.unlist(m)
	if len(t.overdue) == maxOverdue {
		t.remove(t.overdue[0])
	}
	t.overdue = append(t.overdue, m)
	return m
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

func (t *inFlightTable) forgetOverdue(m *Message) {
	for i, o := range t.overdue {
		if o == m {
			t.overdue = append(t.overdue[:i], t.overdue[i+1:]...)
			return
		}
	}
}

// linkByDeadline puts m in its place. New messages and touched ones have the latest deadline but for rare exceptions,
// so the search begins at the end.
func (t *inFlightTable) linkByDeadline(m *Message) {
	if m.delivery.deadline == 0 {
		return
	}
	after := t.last
	for after != nil && after.delivery.deadline > m.delivery.deadline {
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

func (t *inFlightTable) unlinkByDeadline(m *Message) {
	if m.delivery.deadline == 0 {
		return
	}
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
