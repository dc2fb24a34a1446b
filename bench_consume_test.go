package nsq

import (
	"fmt"
	"io"
	"net"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkConsume is a whole cycle: read, decode, hand-off, a handler that does nothing, FIN, write. The other end does as
// little as it can, in this process: over memory, so that next to nothing but the client is measured, and over loopback. An
// iteration is a burst of messages; besides, it reports what one of them takes.
func BenchmarkConsume(b *testing.B) {
	for _, link := range []struct {
		name string
		conn func(b *testing.B, n *bareNSQD) net.Conn
	}{
		{"memory", func(_ *testing.B, n *bareNSQD) net.Conn { return n }},
		{"loopback", overLoopback},
	} {
		for _, size := range benchSizes {
			benchConsume(b, link.name, link.conn, size, 2500, 4)
		}
		for _, maxInFlight := range []int{1, 100} {
			benchConsume(b, link.name, link.conn, benchSizes[0], maxInFlight, 4)
		}
		for _, handlers := range []int{1, 64} {
			benchConsume(b, link.name, link.conn, benchSizes[0], 2500, handlers)
		}
	}
}

func benchConsume(b *testing.B, link string, conn func(*testing.B, *bareNSQD) net.Conn, size benchSize, maxInFlight, handlers int) {
	b.Run(fmt.Sprintf("%s/%s/max-in-flight=%d/handlers=%d", link, size.name, maxInFlight, handlers), func(b *testing.B) {
		burst := max(32, min(4*maxInFlight, 32<<20/size.body))
		n := newBareNSQD(size.body)
		connectBare(b, conn(b, n), maxInFlight, noHandler, handlers)
		n.send(burst) // buffers grow
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		counts := n.countsNow()
		b.SetBytes(int64(burst * size.body))
		for b.Loop() {
			n.send(burst)
		}
		runtime.ReadMemStats(&after)
		counts = n.countsNow().since(counts)
		reportPerMessage(b, burst)
		messages := float64(b.N * burst)
		b.ReportMetric(float64(counts.writes)/messages, "writes/message")
		b.ReportMetric(float64(after.Mallocs-before.Mallocs)/messages, "allocs/message")
	})
}

// overLoopback puts a TCP connection between a client and the nsqd. The writes that the nsqd counts then are its reads.
func overLoopback(b *testing.B, n *bareNSQD) net.Conn {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	require.NoError(b, err)
	server, err := l.Accept()
	require.NoError(b, err)
	var copying sync.WaitGroup
	pump := func(dst io.Writer, src io.Reader, end func() error) {
		copying.Go(func() {
			defer end()
			// Without the shortcuts of io.Copy, which have buffers of their own.
			_, _ = io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, make([]byte, maxReadBuffer))
		})
	}
	pump(n, server, n.CloseWrite)
	pump(server, n, server.Close)
	b.Cleanup(copying.Wait) // the consumer has hung up by then
	return client
}
