package nsq

import (
	"encoding/binary"
	"math/bits"
	"slices"
)

// inFlightTable holds the deliveries of one connection that wait for their answer. It finds them by the place that their
// message knows; by ID, since nsqd may send an ID again; and by deadline. It is guarded by the mutex of its Conn.
//
// What it needs to know of a delivery lies in slots that are used again and again, linked by their numbers: so a message
// is small, costs no allocation here, and gives the garbage collector next to nothing to follow
// (BenchmarkInFlightTable).
//
// A delivery whose deadline has passed while a handler has it is remembered, but no longer counts: should nsqd send the
// same ID again on this connection, a FIN for the old delivery still saves the new one from being handled twice.
type inFlightTable struct {
	slots   []slot   // slots[0] is never used: 0 stands for none
	free    uint32   // the first unused slot
	buckets []uint32 // the first slot with a hash; their number is a power of two
	lastGen uint32   // at least the highest generation of slots that were given up
	live    int      // slots in use, which are the messages that count as unanswered
	bytes   int64    // what those take, by slot.size

	first, last uint32 // the same, the earliest deadline first; those without one in the order they came

	overdue      []deliveryRef // expired ones that a handler still has, oldest first
	overdueByRef map[deliveryRef]overdueDelivery
}

// deliveryRef names a delivery of a connection, for ever: it finds nothing once the delivery is over.
type deliveryRef struct {
	slot uint32 // its place in inFlightTable.slots
	gen  uint32 // how many deliveries that place had before
}

// slot is one delivery, or none.
type slot struct {
	id  MessageID // as it came; the exported ID is the user's
	m   *Message  // the message that came: a program may have copied it
	ref deliveryRef

	size     int    // of the memory that it takes
	deadline int64  // when nsqd takes the message back, by monotonic(); 0: not known
	limit    int64  // how far TOUCH can move the deadline; 0: not known
	period   uint64 // the backoff period whose probe this is; 0: none
	touched  uint64 // the round of writeLoop that has a TOUCH for it: another one would add nothing

	hashNext   uint32 // next in the bucket, or next unused one
	prev, next uint32 // neighbours in the order of deadlines
}

// overdueDelivery is what is remembered of one.
type overdueDelivery struct {
	id     MessageID
	period uint64
}

const (
	// maxOverdue bounds what is remembered of messages that handlers seem to have forgotten.
	maxOverdue = 4096

	minSlots = 16 // to begin with: an idle connection has none
)

// hashMessageID spreads IDs over the low bits, whichever of their digits differ: those of messages that were published
// slowly do so in the middle alone, where nsqd has the time.
func hashMessageID(id *MessageID) uint64 {
	hi, lo := bits.Mul64(binary.BigEndian.Uint64(id[:8])^0x9E3779B97F4A7C15, binary.BigEndian.Uint64(id[8:])^0xD6E8FEB86659FD93)
	return hi ^ lo
}

// insert adds a delivery as unanswered and returns its slot, for the caller to fill in the rest until the next insert.
// The ID must not be in the table.
func (t *inFlightTable) insert(m *Message, deadline int64, size int) *slot {
	if t.free == 0 {
		t.grow()
	}
	i := t.free
	s := &t.slots[i]
	t.free = s.hashNext
	b := t.bucket(&m.ID)
	s.id, s.m, s.size, s.deadline = m.ID, m, size, deadline // one by one: a whole slot would be made elsewhere and copied
	s.limit, s.period, s.touched = 0, 0, 0
	s.hashNext = *b
	*b = i
	t.live++
	t.bytes += int64(size)
	t.linkByDeadline(s)
	return s
}

func (t *inFlightTable) bucket(id *MessageID) *uint32 {
	return &t.buckets[hashMessageID(id)&uint64(len(t.buckets)-1)]
}

// get returns the slot of an unanswered delivery, nil if it isn't one.
func (t *inFlightTable) get(ref deliveryRef) *slot {
	if uint64(ref.slot) >= uint64(len(t.slots)) || ref.slot == 0 {
		return nil
	}
	s := &t.slots[ref.slot]
	if s.ref.gen != ref.gen || s.m == nil {
		return nil
	}
	return s
}

// find returns the slot of the unanswered delivery with this ID, nil if there is none.
func (t *inFlightTable) find(id *MessageID) *slot {
	if t.live == 0 {
		return nil
	}
	for i := *t.bucket(id); i != 0; i = t.slots[i].hashNext {
		if t.slots[i].id == *id {
			return &t.slots[i]
		}
	}
	return nil
}

// remove takes out an unanswered delivery.
func (t *inFlightTable) remove(s *slot) {
	i := s.ref.slot
	p := t.bucket(&s.id)
	for *p != i {
		p = &t.slots[*p].hashNext
	}
	*p = s.hashNext
	t.unlinkByDeadline(s)
	t.live--
	t.bytes -= int64(s.size)
	s.m = nil
	s.ref.gen++
	s.hashNext = t.free
	t.free = i
}

// retire takes out an unanswered delivery that no answer has ended: it is dropped, or remembered if a handler has it. It
// reports whether one has.
func (t *inFlightTable) retire(s *slot) (running bool) {
	m, ref, old := s.m, s.ref, overdueDelivery{s.id, s.period}
	t.remove(s)
	if m.state.drop() {
		m.Body = nil // it may lie in the queue for a while
		return false
	}
	if len(t.overdue) == maxOverdue {
		t.forgetOverdue(t.overdue[0])
	}
	if t.overdueByRef == nil {
		t.overdueByRef = make(map[deliveryRef]overdueDelivery)
	}
	t.overdue = append(t.overdue, ref)
	t.overdueByRef[ref] = old
	return true
}

// forgetOverdue returns what is remembered of an overdue delivery and remembers it no more.
func (t *inFlightTable) forgetOverdue(ref deliveryRef) (old overdueDelivery, ok bool) {
	if old, ok = t.overdueByRef[ref]; ok {
		delete(t.overdueByRef, ref)
		i := slices.Index(t.overdue, ref)
		t.overdue = slices.Delete(t.overdue, i, i+1)
	}
	return old, ok
}

// oldest returns the unanswered delivery with the earliest deadline, nil if there is none.
func (t *inFlightTable) oldest() *slot {
	if t.first == 0 {
		return nil
	}
	return &t.slots[t.first]
}

// due returns the unanswered delivery with the earliest deadline if that is not after now, else nil.
func (t *inFlightTable) due(now int64) *slot {
	if s := t.oldest(); s != nil && !later(s.deadline, now) {
		return s
	}
	return nil
}

// dropOldest takes queued messages out, those first whose deadline is the earliest, until they have made up for so many
// bytes. It returns how many.
func (t *inFlightTable) dropOldest(bytes int64) (n int) {
	for i := t.first; i != 0 && bytes > 0; {
		s := &t.slots[i]
		i = s.next
		if m := s.m; m.state.drop() {
			bytes -= int64(s.size)
			t.remove(s)
			m.Body = nil
			n++
		}
	}
	return n
}

// nextDeadline returns when the next message expires, 0 if none does.
func (t *inFlightTable) nextDeadline() int64 {
	if s := t.oldest(); s != nil {
		return s.deadline
	}
	return 0
}

// postpone gives an unanswered delivery a later deadline.
func (t *inFlightTable) postpone(s *slot, deadline int64) {
	t.unlinkByDeadline(s)
	s.deadline = deadline
	t.linkByDeadline(s)
}

// queued returns the messages in the table that no handler has taken, the earliest deadline first.
func (t *inFlightTable) queued() []*Message {
	var ms []*Message
	for i := t.first; i != 0; i = t.slots[i].next {
		if m := t.slots[i].m; m.state.queued() {
			ms = append(ms, m)
		}
	}
	return ms
}

// release gives up the memory of an empty table, and what is remembered of overdue deliveries stays.
func (t *inFlightTable) release() {
	if t.live > 0 {
		return
	}
	for i := range t.slots {
		t.lastGen = max(t.lastGen, t.slots[i].ref.gen)
	}
	t.slots, t.buckets, t.free = nil, nil, 0
}

// linkByDeadline puts a slot in its place. New messages and touched ones have the latest deadline but for rare exceptions,
// so the search begins at the end.
func (t *inFlightTable) linkByDeadline(s *slot) {
	after := t.last
	for after != 0 && later(t.slots[after].deadline, s.deadline) {
		after = t.slots[after].prev
	}
	s.prev = after
	if after == 0 {
		s.next = t.first
		t.first = s.ref.slot
	} else {
		s.next = t.slots[after].next
		t.slots[after].next = s.ref.slot
	}
	if s.next == 0 {
		t.last = s.ref.slot
	} else {
		t.slots[s.next].prev = s.ref.slot
	}
}

// later compares deadlines; 0 is none, and after all others.
func later(a, b int64) bool { return b != 0 && (a == 0 || a > b) }

func (t *inFlightTable) unlinkByDeadline(s *slot) {
	if s.prev == 0 {
		t.first = s.next
	} else {
		t.slots[s.prev].next = s.next
	}
	if s.next == 0 {
		t.last = s.prev
	} else {
		t.slots[s.next].prev = s.prev
	}
}

// grow doubles the slots and the buckets.
func (t *inFlightTable) grow() {
	old := len(t.slots)
	n := max(minSlots, 2*old)
	t.slots = append(make([]slot, 0, n), t.slots...)[:n]
	for i := n - 1; i >= max(old, 1); i-- {
		t.slots[i].ref = deliveryRef{slot: uint32(i), gen: t.lastGen + 1}
		t.slots[i].hashNext = t.free
		t.free = uint32(i)
	}
	t.buckets = make([]uint32, n)
	for i := t.first; i != 0; i = t.slots[i].next {
		b := t.bucket(&t.slots[i].id)
		t.slots[i].hashNext = *b
		*b = i
	}
}
