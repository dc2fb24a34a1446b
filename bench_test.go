package nsq

import (
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Benchmarks of the parts that a message goes through; of its whole way there is BenchmarkConsume. What has to hold on any
// machine is counted by the tests in cost_test.go.

// benchSizes are the sizes of messages that benchmarks try.
var benchSizes = []benchSize{{"100B", 100}, {"1KiB", 1 << 10}, {"16KiB", 16 << 10}, {"1MiB", 1 << 20}}

type benchSize struct {
	name string
	body int
}

// benchID returns the n-th of a run of IDs like those of one nsqd: hex, with the last digits counting.
func benchID(n uint64) (id MessageID) {
	copy(id[:], fmt.Sprintf("%016x", 0x0f5a1b2c00000000+n))
	return id
}

// reportPerMessage reports what one of the messages took, where an iteration has many.
func reportPerMessage(b *testing.B, messages int) {
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*messages), "ns/message")
}

// BenchmarkDecode is the way from bytes to messages, per message: cutting out frames, copying bodies.
func BenchmarkDecode(b *testing.B) {
	for _, size := range benchSizes {
		b.Run(size.name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(frameHeader + messageHeaderSize + size.body))
			id := benchID(1)
			data := make([]byte, messageHeaderSize+size.body)
			copy(data[messageHeaderSize-len(id):], id[:])
			d := benchDecoder{frames: newFrameReader(&endless{data: fakeFrame(FrameTypeMessage, data)}, 0)}
			for left := 0; b.Loop(); left-- {
				for left == 0 {
					left = d.next(b)
				}
			}
		})
	}
}

// benchDecoder does what Conn.read does.
type benchDecoder struct {
	frames *frameReader
	batch  messageBatch
}

// next decodes what there is for a batch, after a read if it has to be, and returns the number of messages.
func (d *benchDecoder) next(b *testing.B) (messages int) {
	for messages == 0 {
		_, data, body, ok, err := d.frames.next()
		if err == nil && !ok {
			if messages = d.take(); messages == 0 {
				err = d.frames.fill()
			}
		}
		if err == nil && ok {
			if d.batch.full(data, body) {
				messages = d.take()
			}
			err = d.batch.add(data, body)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	return messages
}

func (d *benchDecoder) take() int {
	if d.batch.empty() {
		return 0
	}
	return len(d.batch.take().messages)
}

// BenchmarkEncode is the way of a command into a buffer.
func BenchmarkEncode(b *testing.B) {
	for _, command := range []struct {
		name   string
		append func(dst []byte) []byte
	}{
		{"FIN", func(dst []byte) []byte { return appendFinish(dst, testID) }},
		{"REQ", func(dst []byte) []byte { return appendRequeue(dst, testID, 90*time.Second) }},
		{"TOUCH", func(dst []byte) []byte { return appendTouch(dst, testID) }},
		{"RDY", func(dst []byte) []byte { return appendReady(dst, 2500) }},
	} {
		b.Run(command.name, func(b *testing.B) {
			b.ReportAllocs()
			dst := make([]byte, 0, 64)
			for b.Loop() {
				dst = command.append(dst[:0])
			}
		})
	}
	for _, size := range benchSizes {
		b.Run("PUB/"+size.name, func(b *testing.B) {
			b.ReportAllocs()
			body := make([]byte, size.body)
			for b.Loop() {
				if _, err := Publish("topic", body).WriteTo(io.Discard); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkInFlightTable is a message that comes and is answered, with so many unanswered.
func BenchmarkInFlightTable(b *testing.B) {
	for _, held := range []int{1, 100, 2500} {
		b.Run(fmt.Sprintf("held=%d", held), func(b *testing.B) {
			b.ReportAllocs()
			var table inFlightTable
			ms := make([]Message, held)
			refs := make([]deliveryRef, held)
			for i := range ms {
				ms[i].ID = benchID(uint64(i))
				refs[i] = table.insert(&ms[i], int64(i+1), 100).ref
			}
			deadline := int64(held)
			for i := 0; b.Loop(); i++ {
				at := i % held
				table.remove(table.get(refs[at]))
				deadline++
				refs[at] = table.insert(&ms[at], deadline, 100).ref
			}
		})
	}
}

// BenchmarkFinish is the way of a FIN: messages are entered as unanswered, so many goroutines finish them, and what has
// gathered is taken as writeLoop takes it. There is no network.
func BenchmarkFinish(b *testing.B) {
	for _, bench := range []struct{ handlers, gathered int }{{1, 1}, {1, 100}, {1, 2500}, {4, 2500}, {64, 2500}} {
		b.Run(fmt.Sprintf("handlers=%d/FINs-per-write=%d", bench.handlers, bench.gathered), func(b *testing.B) {
			b.ReportAllocs()
			c := newConn("nsqd-1:4150", NewConfig(), new(heardOwner), new(loggers))
			c.allow(2500)
			window := benchWindow(bench.gathered)
			finish := newBenchCrew(bench.handlers, func(i int) { window.messages[i].Finish() })
			defer finish.close()
			var spare []byte
			for b.Loop() {
				for i := range window.messages { // as they came
					window.messages[i] = Message{ID: window.ids[i]}
				}
				if _, err := c.enter(&window.arrivals, monotonic()); err != nil {
					b.Fatal(err)
				}
				finish.run(bench.gathered)
				batch := c.takeOut(spare)
				if batch.answers != bench.gathered {
					b.Fatal(batch.answers)
				}
				c.wrote(batch)
				spare = batch.bytes[:0]
			}
			reportPerMessage(b, bench.gathered)
		})
	}
}

type benchMessages struct {
	arrivals
	ids []MessageID
}

// benchWindow returns so many messages, each with an ID of its own.
func benchWindow(n int) *benchMessages {
	w := &benchMessages{arrivals: arrivals{messages: make([]Message, n)}}
	for i := range n {
		w.ids = append(w.ids, benchID(uint64(i)))
	}
	return w
}

// benchCrew is a number of goroutines that share work which comes in rounds. A crew of one is the caller itself.
type benchCrew struct {
	do     func(i int)
	rounds chan int // one for each goroutine: how much work there is
	next   atomic.Int64
	done   sync.WaitGroup
	ended  sync.WaitGroup
}

func newBenchCrew(n int, do func(i int)) *benchCrew {
	c := &benchCrew{do: do, rounds: make(chan int, n)}
	if n == 1 {
		return c
	}
	for range n {
		c.ended.Go(func() {
			for work := range c.rounds {
				c.share(work)
				c.done.Done()
			}
		})
	}
	return c
}

func (c *benchCrew) share(work int) {
	for i := int(c.next.Add(1)) - 1; i < work; i = int(c.next.Add(1)) - 1 {
		c.do(i)
	}
}

// run has the crew do(0) to do(work-1).
func (c *benchCrew) run(work int) {
	c.next.Store(0)
	if cap(c.rounds) == 1 {
		c.share(work)
		return
	}
	c.done.Add(cap(c.rounds))
	for range cap(c.rounds) {
		c.rounds <- work
	}
	c.done.Wait()
}

func (c *benchCrew) close() {
	close(c.rounds)
	c.ended.Wait()
}

// BenchmarkInbox is the hand-off: one goroutine puts messages in as they come by the batch, so many take them out.
func BenchmarkInbox(b *testing.B) {
	const round = 64 * 40 // about max-in-flight
	for _, handlers := range []int{1, 4, 64} {
		for _, batch := range []int{1, 8, 64} {
			b.Run(fmt.Sprintf("handlers=%d/batch=%d", handlers, batch), func(b *testing.B) {
				b.ReportAllocs()
				ms := make([]Message, round)
				q := newInbox()
				var left atomic.Int64
				over := make(chan struct{}, 1)
				var taking sync.WaitGroup
				for range handlers {
					taking.Go(func() {
						for more := true; more; more = q.wait() {
							for m, _ := q.take(); m != nil; m, _ = q.take() {
								if left.Add(-1) == 0 {
									over <- struct{}{}
								}
							}
						}
					})
				}
				for b.Loop() {
					left.Store(round)
					for i := 0; i < round; i += batch {
						q.put(&arrivals{messages: ms[i : i+batch]})
					}
					<-over
				}
				reportPerMessage(b, round)
				q.close()
				taking.Wait()
			})
		}
	}
}

// BenchmarkRDYRules is one look of rdyLoop at its connections, without the looking itself.
func BenchmarkRDYRules(b *testing.B) {
	for _, conns := range []int{1, 10, 100, 1000} {
		for _, bench := range []struct {
			name        string
			maxInFlight int
			next        func(rules *rdyBench) // what happens until the next look
		}{
			{"nothing-happens", 2500, func(*rdyBench) {}},
			{"one-in-ten-is-busy", 2500, func(rules *rdyBench) { // and demand is looked at each time
				for i, c := range rules.conns {
					if i%10 == 0 {
						c.peak, c.unanswered, c.received, c.lastMessage = c.written, c.written, 1, rules.now
					}
				}
				rules.now = rules.now.Add(rules.interval)
			}},
			{"turns", max(1, conns/10), func(rules *rdyBench) { rules.now = rules.now.Add(rules.turnIdle) }},
		} {
			b.Run(fmt.Sprintf("conns=%d/%s", conns, bench.name), func(b *testing.B) {
				b.ReportAllocs()
				rules := newRDYBench(int64(bench.maxInFlight))
				rules.addSettled(conns)
				for b.Loop() {
					bench.next(rules)
					rules.step()
				}
			})
		}
	}
}
