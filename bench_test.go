package nsq

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// benchID returns the n-th of a run of IDs like those of one nsqd: hex, with the last digits counting.
func benchID(n uint64) (id MessageID) {
	copy(id[:], fmt.Sprintf("%016x", 0x0f5a1b2c00000000+n))
	return id
}

func BenchmarkInFlightTable(b *testing.B) {
	for _, held := range []int{1, 100, 2500} {
		b.Run(fmt.Sprintf("held=%d", held), func(b *testing.B) {
			b.ReportAllocs()
			ms := make([]Message, held)
			var table inFlightTable
			for i := range ms {
				ms[i].delivery.id = benchID(uint64(i))
				ms[i].delivery.deadline = int64(i + 1)
				table.insert(&ms[i])
			}
			deadline := int64(held)
			for i := 0; b.Loop(); i++ {
				m := &ms[i%held]
				table.remove(m)
				deadline++
				m.delivery.deadline = deadline
				table.insert(m)
			}
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	for _, size := range []int{100, 1 << 10, 16 << 10} {
		b.Run(fmt.Sprintf("body=%d", size), func(b *testing.B) {
			b.ReportAllocs()
			data := make([]byte, messageHeaderSize+size)
			id := benchID(1)
			copy(data[10:], id[:])
			var batch messageBatch
			for b.Loop() {
				if batch.full(data) {
					batch.take()
				}
				if err := batch.add(data, false); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkConsume is a whole cycle over loopback, per message: read, decode, hand-off, a handler that does nothing,
// FIN, write. The other end does as little as it can, in this process.
func BenchmarkConsume(b *testing.B) {
	for _, maxInFlight := range []int{1, 100, 2500} {
		b.Run(fmt.Sprintf("max-in-flight=%d", maxInFlight), func(b *testing.B) {
			b.ReportAllocs()
			server := newBenchServer(b, 100)
			cfg := NewConfig()
			cfg.MaxInFlight = maxInFlight
			cfg.Dial = func(context.Context, string, string) (net.Conn, error) {
				return net.Dial("tcp", server.listener.Addr().String())
			}
			r, err := NewConsumer("t", "c", cfg)
			require.NoError(b, err)
			r.SetLogger(nil, LogLevelError)
			var handled atomic.Int64
			goal, done := int64(1<<62), make(chan struct{}, 1)
			r.AddConcurrentHandlers(HandlerFunc(func(*Message) error {
				if handled.Add(1) == atomic.LoadInt64(&goal) {
					done <- struct{}{}
				}
				return nil
			}), 4)
			require.NoError(b, r.ConnectToNSQD("bench:4150"))
			atomic.StoreInt64(&goal, int64(b.N))
			b.ResetTimer()
			server.send(b.N)
			<-done
			b.StopTimer()
			r.Stop()
			<-r.StopChan
		})
	}
}

// benchServer is an nsqd that honours RDY and nothing else.
type benchServer struct {
	listener net.Listener
	body     []byte
	rdy      atomic.Int64
	answered atomic.Int64
	changed  chan struct{} // size 1: rdy or answered did
	conn     chan net.Conn
}

func newBenchServer(b *testing.B, size int) *benchServer {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	s := &benchServer{listener: l, body: make([]byte, size), changed: make(chan struct{}, 1), conn: make(chan net.Conn, 1)}
	go s.serve()
	b.Cleanup(func() { _ = l.Close() })
	return s
}

func (s *benchServer) serve() {
	nc, err := s.listener.Accept()
	if err != nil {
		return
	}
	defer nc.Close()
	s.conn <- nc
	r := bufio.NewReaderSize(nc, 64<<10)
	if _, err := r.Discard(len(MagicV2)); err != nil {
		return
	}
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return
		}
		s.handle(nc, r, line)
	}
}

func (s *benchServer) handle(nc net.Conn, r *bufio.Reader, line []byte) {
	switch {
	case bytes.HasPrefix(line, []byte("FIN")):
		s.answered.Add(1)
		if r.Buffered() > 0 {
			return
		}
	case bytes.HasPrefix(line, []byte("RDY")):
		n, _ := strconv.Atoi(string(bytes.TrimSpace(line[4:])))
		s.rdy.Store(int64(n))
	case bytes.HasPrefix(line, []byte("IDENTIFY")):
		var size uint32
		_ = binary.Read(r, binary.BigEndian, &size)
		_, _ = io.CopyN(io.Discard, r, int64(size))
		_, _ = nc.Write(benchFrame(FrameTypeResponse, []byte("OK")))
	case bytes.HasPrefix(line, []byte("SUB")):
		_, _ = nc.Write(benchFrame(FrameTypeResponse, []byte("OK")))
	case bytes.HasPrefix(line, []byte("CLS")):
		_, _ = nc.Write(benchFrame(FrameTypeResponse, []byte("CLOSE_WAIT")))
	}
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// send sends n messages, as many at a time as RDY allows.
func (s *benchServer) send(n int) {
	nc := <-s.conn
	var buf []byte
	for sent := int64(0); sent < int64(n); {
		room := min(s.rdy.Load()-(sent-s.answered.Load()), int64(n)-sent)
		if room <= 0 {
			select {
			case <-s.changed:
			case <-time.After(10 * time.Second):
				panic("no FIN comes")
			}
			continue
		}
		buf = buf[:0]
		for range room {
			id := benchID(uint64(sent))
			sent++
			var head [messageHeaderSize]byte
			binary.BigEndian.PutUint16(head[8:], 1)
			copy(head[10:], id[:])
			buf = append(buf, benchFrame(FrameTypeMessage, append(head[:], s.body...))...)
		}
		if _, err := nc.Write(buf); err != nil {
			panic(err)
		}
	}
}

func benchFrame(frameType int32, data []byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(4+len(data)))
	b = binary.BigEndian.AppendUint32(b, uint32(frameType))
	return append(b, data...)
}
