package nsq

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// tableModel is what an inFlightTable does, said in the plainest way.
type tableModel struct {
	live    map[*Message]modelDelivery // those that count
	overdue []modelDelivery            // ended by nobody, while a handler has them; oldest first
}

// modelDelivery is what the table is told of a message.
type modelDelivery struct {
	m        *Message
	ref      deliveryRef
	id       MessageID
	deadline int64
	period   uint64
	size     int
}

func (o *tableModel) find(id MessageID) *Message {
	for m, d := range o.live {
		if d.id == id {
			return m
		}
	}
	return nil
}

// due returns the live messages whose deadline is not after now.
func (o *tableModel) due(now int64) (due []*Message) {
	for m, d := range o.live {
		if d.deadline != 0 && d.deadline <= now {
			due = append(due, m)
		}
	}
	return due
}

func (o *tableModel) nextDeadline() (next int64) {
	for _, d := range o.live {
		if d.deadline != 0 && (next == 0 || d.deadline < next) {
			next = d.deadline
		}
	}
	return next
}

// retire ends a delivery that was not answered.
func (o *tableModel) retire(m *Message) {
	if !m.state.dropped() {
		o.overdue = append(o.overdue, o.live[m])
	}
	delete(o.live, m)
}

// tableTest holds a table against its model.
type tableTest struct {
	t     *testing.T
	rng   *rand.Rand
	table inFlightTable
	model tableModel
	now   int64
	step  string
	past  []deliveryRef // of deliveries that are over
}

func newTableTest(t *testing.T, seed uint64) *tableTest {
	return &tableTest{
		t:     t,
		rng:   rand.New(rand.NewPCG(seed, 1)),
		model: tableModel{live: map[*Message]modelDelivery{}},
		now:   1,
	}
}

// tableID makes ids that differ in one half only as often as in both.
func tableID(n uint64) (id MessageID) {
	binary.BigEndian.PutUint64(id[:], n&1)
	binary.BigEndian.PutUint64(id[8:], n>>1)
	return id
}

func (x *tableTest) insert(ids uint64) {
	m := &Message{ID: tableID(x.rng.Uint64N(ids)), Body: []byte("x")}
	d := modelDelivery{m: m, id: m.ID, size: x.rng.IntN(1000), period: x.rng.Uint64N(3)}
	switch x.rng.IntN(10) {
	case 0: // no deadline
	case 1, 2: // out of order
		d.deadline = x.now + 1 + x.rng.Int64N(100)
	default:
		d.deadline = x.now + 60
	}
	if x.rng.IntN(2) == 0 {
		require.True(x.t, m.state.run())
	}
	if old := x.table.find(&m.ID); old != nil {
		x.retire(old)
	}
	s := x.table.insert(m, d.deadline, d.size)
	s.period = d.period
	d.ref = s.ref
	x.model.live[m] = d
	m.ID = tableID(ids + 1) // a program's own affair
}

// retire retires a delivery.
func (x *tableTest) retire(s *slot) {
	m := s.m
	require.Contains(x.t, x.model.live, m, x.step)
	x.past = append(x.past, s.ref)
	require.Equal(x.t, !m.state.queued(), x.table.retire(s), x.step)
	require.Equal(x.t, m.state.dropped(), m.Body == nil, x.step)
	require.False(x.t, m.state.queued(), "no handler shall get it any more; "+x.step)
	x.model.retire(m)
}

// anyLive picks one of the messages, in an order that depends on nothing but the seed.
func (x *tableTest) anyLive() (d modelDelivery, ok bool) {
	if len(x.model.live) == 0 {
		return d, false
	}
	ds := slices.SortedFunc(maps.Values(x.model.live), func(a, b modelDelivery) int { return slices.Compare(a.id[:], b.id[:]) })
	return ds[x.rng.IntN(len(ds))], true
}

func (x *tableTest) remove() {
	if d, ok := x.anyLive(); ok {
		x.table.remove(x.table.get(d.ref))
		delete(x.model.live, d.m)
		x.past = append(x.past, d.ref)
	}
}

func (x *tableTest) forgetOverdue() {
	if n := len(x.model.overdue); n > 0 {
		i := x.rng.IntN(n)
		d := x.model.overdue[i]
		old, ok := x.table.forgetOverdue(d.ref)
		require.True(x.t, ok, x.step)
		require.Equal(x.t, overdueDelivery{d.id, d.period}, old, x.step)
		x.model.overdue = slices.Delete(x.model.overdue, i, i+1)
	}
}

func (x *tableTest) postpone() {
	d, ok := x.anyLive()
	if !ok || d.deadline == 0 {
		return
	}
	d.deadline += x.rng.Int64N(60)
	x.table.postpone(x.table.get(d.ref), d.deadline)
	x.model.live[d.m] = d
}

func (x *tableTest) expire() {
	x.now += x.rng.Int64N(30)
	due := x.model.due(x.now)
	last := int64(0)
	for range due {
		s := x.table.due(x.now)
		require.NotNil(x.t, s, x.step)
		require.Contains(x.t, due, s.m, x.step)
		require.LessOrEqual(x.t, last, s.deadline, "the earliest first; "+x.step)
		last = s.deadline
		x.retire(s)
	}
	require.Nil(x.t, x.table.due(x.now), x.step)
}

// clear retires all, as the end of a connection does.
func (x *tableTest) clear() {
	for s := x.table.oldest(); s != nil; s = x.table.oldest() {
		x.retire(s)
	}
	x.table.release()
	require.Nil(x.t, x.table.slots, x.step)
}

// compare looks at all that the table shows.
func (x *tableTest) compare(ids uint64) {
	require.Equal(x.t, len(x.model.live), x.table.live, x.step)
	require.Equal(x.t, x.model.nextDeadline(), x.table.nextDeadline(), x.step)
	var bytes int64
	var queued []*Message
	for m, d := range x.model.live {
		bytes += int64(d.size)
		s := x.table.get(d.ref)
		require.NotNil(x.t, s, x.step)
		require.Same(x.t, m, s.m, x.step)
		require.Same(x.t, s, x.table.find(&d.id), x.step)
		require.Equal(x.t, d, modelDelivery{s.m, s.ref, s.id, s.deadline, s.period, s.size}, x.step)
		if m.state.queued() {
			queued = append(queued, m)
		}
	}
	require.Equal(x.t, bytes, x.table.bytes, x.step)
	require.ElementsMatch(x.t, queued, x.table.queued(), x.step)
	for _, ref := range x.past {
		require.Nil(x.t, x.table.get(ref), "a delivery that is over is not found for ever; "+x.step)
	}
	require.Len(x.t, x.table.overdue, len(x.model.overdue), x.step)
	require.Len(x.t, x.table.overdueByRef, len(x.model.overdue), x.step)
	for i, d := range x.model.overdue {
		require.Equal(x.t, d.ref, x.table.overdue[i], x.step)
		require.Equal(x.t, overdueDelivery{d.id, d.period}, x.table.overdueByRef[d.ref], x.step)
	}
	for n := range ids {
		if id := tableID(n); x.model.find(id) == nil {
			require.Nil(x.t, x.table.find(&id), x.step)
		}
	}
}

func TestInFlightTableAgainstAMap(t *testing.T) {
	skipUnderRace(t, "a table that is guarded by a mutex elsewhere")
	t.Parallel()
	const ids = 200
	for seed := range uint64(4) {
		x := newTableTest(t, seed)
		for i := range 1000 {
			x.step = fmt.Sprintf("seed %d, step %d", seed, i)
			switch p := x.rng.IntN(1000); {
			case p < 550:
				x.insert(ids)
			case p < 750:
				x.remove()
			case p < 800:
				x.forgetOverdue()
			case p < 900:
				x.postpone()
			case p < 995:
				x.expire()
			default:
				x.clear()
			}
			if i%30 == 0 || i < 40 {
				x.compare(ids)
			}
		}
		x.compare(ids)
		x.clear()
		x.compare(ids)
	}
}

func TestInFlightTableForgetsWhatHandlersForgot(t *testing.T) {
	var table inFlightTable
	var first deliveryRef
	for i := range uint64(maxOverdue + 10) {
		m := &Message{ID: tableID(i)}
		m.state.run()
		s := table.insert(m, int64(i)+1, 100)
		if i == 0 {
			first = s.ref
		}
		require.True(t, table.retire(s))
	}
	require.Len(t, table.overdue, maxOverdue)
	require.Len(t, table.overdueByRef, maxOverdue)
	require.Zero(t, table.live)
	_, ok := table.forgetOverdue(first)
	require.False(t, ok)
}

// An answer that comes with what a message knew when it came must never end another delivery.
func TestInFlightTableNeverMistakesADelivery(t *testing.T) {
	var table inFlightTable
	seen := map[deliveryRef]bool{}
	for i := range uint64(3000) {
		if i%1000 == 999 {
			table.release()
		}
		var held []deliveryRef
		for j := range i % 40 {
			ref := table.insert(&Message{ID: tableID(j)}, 0, 1).ref
			require.False(t, seen[ref])
			seen[ref] = true
			held = append(held, ref)
		}
		for _, ref := range held {
			table.remove(table.get(ref))
		}
	}
	require.Nil(t, table.get(deliveryRef{}))
	require.Nil(t, table.get(deliveryRef{slot: 1 << 31}))
}

func TestInFlightTableCostsNothingPerMessage(t *testing.T) {
	var table inFlightTable
	ms := make([]Message, 100)
	refs := make([]deliveryRef, len(ms))
	cycle := func() {
		for i := range ms {
			ms[i].ID = tableID(uint64(i))
			refs[i] = table.insert(&ms[i], 1, 100).ref
		}
		for _, ref := range refs {
			table.remove(table.get(ref))
		}
	}
	cycle()
	require.Zero(t, testing.AllocsPerRun(10, cycle))
}

// Walking along a bucket is what finding a message costs.
func TestInFlightTableSpreadsIDs(t *testing.T) {
	// nsqdID is made as nsqd does: 42 bits of time, in units of about a millisecond, 10 of its node and 12 of a count within
	// the unit.
	nsqdID := func(time, count uint64) string { return fmt.Sprintf("%016x", time<<22|617<<12|count) }
	const now = 0x5D3C000000
	for name, makeID := range map[string]func(i uint64) string{
		"published fast":           func(i uint64) string { return nsqdID(now+i>>12, i&(1<<12-1)) },
		"published one by one":     func(i uint64) string { return nsqdID(now+i, 0) },
		"published now and then":   func(i uint64) string { return nsqdID(now+1024*i, 0) },
		"published in small parts": func(i uint64) string { return nsqdID(now+i/3, i%3) },
		"counted":                  func(i uint64) string { return fmt.Sprintf("%016d", i) },
		"counted in front":         func(i uint64) string { return fmt.Sprintf("%-16d", i) },
	} {
		t.Run(name, func(t *testing.T) {
			var table inFlightTable
			ms := make([]Message, 2500)
			for i := range ms {
				ms[i].ID = MessageID([]byte(makeID(uint64(i))))
				table.insert(&ms[i], 0, 1)
			}
			longest := 0
			for _, i := range table.buckets {
				length := 0
				for ; i != 0; i = table.slots[i].hashNext {
					length++
				}
				longest = max(longest, length)
			}
			require.LessOrEqual(t, longest, 10)
		})
	}
}

func messageFrame(id uint64, body []byte) []byte {
	data := make([]byte, messageHeaderSize, messageHeaderSize+len(body))
	data[9] = 3
	n := tableID(id)
	copy(data[10:], n[:])
	return append(data, body...)
}

func TestMessageBatchCopiesWhatItDoesNotOwn(t *testing.T) {
	var b messageBatch
	require.True(t, b.empty())
	for range 2 { // a batch is used again
		one, two, head := messageFrame(1, []byte("one")), messageFrame(2, nil), messageFrame(3, nil)
		large := make([]byte, 100<<10)
		require.NoError(t, b.add(one, nil))
		require.NoError(t, b.add(two, nil))
		require.True(t, b.full(head, large), "a large one is alone")
		ms := b.take().messages
		require.True(t, b.empty())
		require.NoError(t, b.add(head, large))
		require.True(t, b.full(one, nil))
		clear(head)
		ms = append(ms, b.take().messages...)
		require.Len(t, ms, 3)
		copy(one[messageHeaderSize:], "XXX") // the reader's buffer is used again
		large[0] = 'L'
		require.Equal(t, "one", string(ms[0].Body))
		require.Empty(t, ms[1].Body)
		require.Len(t, ms[2].Body, 100<<10)
		require.EqualValues(t, 'L', ms[2].Body[0], "a large body is not copied")
		for i := range ms {
			m := &ms[i]
			require.Equal(t, tableID(uint64(i+1)), m.ID)
			require.EqualValues(t, 3, m.Attempts)
		}
		grown := append(ms[0].Body, "two"...)
		require.Equal(t, "onetwo", string(grown))
		require.Empty(t, ms[1].Body, "a handler that appends to its body must not reach its neighbour")
	}
}

func TestMessageBatchWithOneEmptyBody(t *testing.T) {
	var b messageBatch
	require.NoError(t, b.add(messageFrame(1, nil), nil))
	body := b.take().messages[0].Body
	require.NotNil(t, body)
	require.Empty(t, body)
}

func TestMessageBatchStaysSmall(t *testing.T) {
	for name, test := range map[string]struct {
		body int
		want int
	}{
		"small bodies":        {10, maxBatch},
		"empty bodies":        {0, maxBatch},
		"middling bodies":     {1000, maxBatchBodies / 1000},
		"bodies on the brink": {maxBatchBodies, 1},
	} {
		t.Run(name, func(t *testing.T) {
			var b messageBatch
			data := messageFrame(1, make([]byte, test.body))
			n := 0
			for ; n < 1000 && !b.full(data, nil); n++ {
				require.NoError(t, b.add(data, nil))
			}
			require.LessOrEqual(t, n, test.want)
			require.GreaterOrEqual(t, n, max(1, test.want-1))
			require.Len(t, b.take().messages, n)
			require.False(t, b.full(data, nil))
		})
	}
}

func TestMessageBatchRefusesShortFrames(t *testing.T) {
	var b messageBatch
	for n := range messageHeaderSize {
		require.EqualError(t, b.add(make([]byte, n), nil), "not enough data to decode valid message")
	}
	require.True(t, b.empty())
	require.NoError(t, b.add(make([]byte, messageHeaderSize), nil))
}
