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
	byID    map[MessageID]*Message // all that can be found
	live    map[*Message]bool      // those that count
	overdue []*Message             // expired while a handler has them, oldest first
}

// due returns the live messages whose deadline is not after now.
func (o *tableModel) due(now int64) (due []*Message) {
	for m := range o.live {
		if d := m.delivery.deadline; d != 0 && d <= now {
			due = append(due, m)
		}
	}
	return due
}

func (o *tableModel) nextDeadline() (next int64) {
	for m := range o.live {
		if d := m.delivery.deadline; d != 0 && (next == 0 || d < next) {
			next = d
		}
	}
	return next
}

func (o *tableModel) remove(m *Message) {
	delete(o.byID, m.delivery.id)
	delete(o.live, m)
	o.overdue = slices.DeleteFunc(o.overdue, func(x *Message) bool { return x == m })
}

// tableTest holds a table against its model.
type tableTest struct {
	t     *testing.T
	rng   *rand.Rand
	table inFlightTable
	model tableModel
	now   int64
	step  string
}

func newTableTest(t *testing.T, seed uint64) *tableTest {
	return &tableTest{
		t:     t,
		rng:   rand.New(rand.NewPCG(seed, 1)),
		model: tableModel{byID: map[MessageID]*Message{}, live: map[*Message]bool{}},
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
	m := &Message{}
	m.delivery.id = tableID(x.rng.Uint64N(ids))
	m.delivery.size = x.rng.IntN(1000)
	switch x.rng.IntN(10) {
	case 0: // no deadline
	case 1, 2: // out of order
		m.delivery.deadline = x.now + 1 + x.rng.Int64N(100)
	default:
		m.delivery.deadline = x.now + 60
	}
	if x.rng.IntN(2) == 0 {
		require.True(x.t, m.delivery.state.run())
	}
	old := x.model.byID[m.delivery.id]
	require.Same(x.t, old, x.table.insert(m), x.step)
	if old != nil {
		x.model.remove(old)
		require.False(x.t, old.delivery.listed, x.step)
	}
	x.model.byID[m.delivery.id] = m
	x.model.live[m] = true
}

// anyOf picks one of the messages, in an order that depends on nothing but the seed.
func (x *tableTest) anyOf(ms []*Message) *Message {
	if len(ms) == 0 {
		return nil
	}
	slices.SortFunc(ms, func(a, b *Message) int { return slices.Compare(a.delivery.id[:], b.delivery.id[:]) })
	return ms[x.rng.IntN(len(ms))]
}

func (x *tableTest) remove() {
	if m := x.anyOf(slices.Collect(maps.Values(x.model.byID))); m != nil {
		x.table.remove(m)
		x.model.remove(m)
		require.False(x.t, m.delivery.listed, x.step)
	}
}

func (x *tableTest) postpone() {
	m := x.anyOf(slices.Collect(maps.Keys(x.model.live)))
	if m == nil || m.delivery.deadline == 0 {
		return
	}
	x.table.postpone(m, m.delivery.deadline+x.rng.Int64N(60))
}

func (x *tableTest) expire() {
	x.now += x.rng.Int64N(30)
	due := x.model.due(x.now)
	last := int64(0)
	for range due {
		m := x.table.expire(x.now)
		require.NotNil(x.t, m, x.step)
		require.Contains(x.t, due, m, x.step)
		require.LessOrEqual(x.t, last, m.delivery.deadline, "the earliest first; "+x.step)
		last = m.delivery.deadline
		require.True(x.t, x.model.live[m], x.step)
		delete(x.model.live, m)
		require.False(x.t, m.delivery.state.queued(), "no handler shall get it any more; "+x.step)
		if m.delivery.state.dropped() {
			delete(x.model.byID, m.delivery.id)
		} else {
			x.model.overdue = append(x.model.overdue, m)
		}
	}
	require.Nil(x.t, x.table.expire(x.now), x.step)
}

func (x *tableTest) clear() {
	want := maps.Clone(x.model.byID)
	x.table.clear(func(m *Message) {
		require.Same(x.t, want[m.delivery.id], m, x.step)
		require.False(x.t, m.delivery.listed, x.step)
		delete(want, m.delivery.id)
	})
	require.Empty(x.t, want, x.step)
	x.model = tableModel{byID: map[MessageID]*Message{}, live: map[*Message]bool{}}
}

// compare looks at all that the table shows.
func (x *tableTest) compare(ids uint64) {
	require.Equal(x.t, len(x.model.live), x.table.live, x.step)
	require.Equal(x.t, len(x.model.byID), x.table.live+len(x.table.overdue), x.step)
	var bytes int64
	for m := range x.model.live {
		bytes += int64(m.delivery.size)
	}
	require.Equal(x.t, bytes, x.table.bytes, x.step)
	require.Equal(x.t, x.model.nextDeadline(), x.table.nextDeadline(), x.step)
	require.Equal(x.t, len(x.model.overdue), len(x.table.overdue), x.step)
	for n := range ids {
		id := tableID(n)
		m := x.table.find(&id)
		require.Same(x.t, x.model.byID[id], m, x.step)
		if m != nil {
			require.True(x.t, x.table.holds(m), x.step)
			require.Equal(x.t, x.model.live[m], m.delivery.listed, x.step)
		}
	}
	queued := map[*Message]bool{}
	for _, m := range x.table.queued() {
		require.False(x.t, queued[m], x.step)
		queued[m] = true
	}
	for _, m := range x.model.byID {
		require.Equal(x.t, m.delivery.state.queued(), queued[m], x.step)
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
	var first *Message
	for i := range uint64(maxOverdue + 10) {
		m := &Message{}
		m.delivery.id, m.delivery.deadline = tableID(i), int64(i)+1
		m.delivery.state.run()
		table.insert(m)
		require.Same(t, m, table.expire(int64(i)+1))
		if i == 0 {
			first = m
		}
	}
	require.Len(t, table.overdue, maxOverdue)
	require.Len(t, table.overdueByID, maxOverdue)
	require.Zero(t, table.live)
	require.False(t, table.holds(first))
}

func TestInFlightTableCostsNothingPerMessage(t *testing.T) {
	var table inFlightTable
	ms := make([]Message, 100)
	for i := range ms {
		ms[i].delivery.id, ms[i].delivery.deadline = tableID(uint64(i)), 1
	}
	cycle := func() {
		for i := range ms {
			table.insert(&ms[i])
		}
		for i := range ms {
			table.remove(&ms[i])
		}
	}
	cycle()
	require.Zero(t, testing.AllocsPerRun(10, cycle))
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
		one, two, large := messageFrame(1, []byte("one")), messageFrame(2, nil), messageFrame(3, make([]byte, 100<<10))
		require.NoError(t, b.add(one, false))
		require.NoError(t, b.add(two, false))
		require.NoError(t, b.add(large, true))
		require.True(t, b.full(one), "what is owned is the last")
		ms := b.take()
		require.True(t, b.empty())
		require.Len(t, ms, 3)
		copy(one[messageHeaderSize:], "XXX") // the reader's buffer is used again
		large[messageHeaderSize] = 'L'
		require.Equal(t, "one", string(ms[0].Body))
		require.Empty(t, ms[1].Body)
		require.Len(t, ms[2].Body, 100<<10)
		require.EqualValues(t, 'L', ms[2].Body[0], "owned data is not copied")
		for i, m := range ms {
			require.Equal(t, tableID(uint64(i+1)), m.ID)
			require.EqualValues(t, 3, m.Attempts)
		}
		grown := append(ms[0].Body, "two"...)
		require.Equal(t, "onetwo", string(grown))
		require.Empty(t, ms[1].Body, "a handler that appends to its body must not reach its neighbour")
	}
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
			for ; n < 1000 && !b.full(data); n++ {
				require.NoError(t, b.add(data, false))
			}
			require.LessOrEqual(t, n, test.want)
			require.GreaterOrEqual(t, n, max(1, test.want-1))
			require.Len(t, b.take(), n)
			require.False(t, b.full(data))
		})
	}
}

func TestMessageBatchRefusesShortFrames(t *testing.T) {
	var b messageBatch
	for n := range messageHeaderSize {
		require.EqualError(t, b.add(make([]byte, n), false), "not enough data to decode valid message")
	}
	require.True(t, b.empty())
	require.NoError(t, b.add(make([]byte, messageHeaderSize), false))
}
