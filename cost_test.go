package nsq

import (
	"bufio"
	"context"
	"encoding/binary"
	"io"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A message costs next to no allocation on its way from the socket to the handler, nor does its FIN on the way back:
// messages and bodies come by the batch, commands are appended to one buffer.
func TestMessagesCostFewAllocations(t *testing.T) {
	checkNoLeaks(t)
	const messages = 2500 // RDY
	client, server := net.Pipe()
	var serving sync.WaitGroup
	defer serving.Wait()
	begin := make(chan struct{})
	serving.Go(func() { serveMessages(t, server, messages, begin) })

	cfg := NewConfig()
	cfg.MaxInFlight = 2500
	cfg.Dial = func(context.Context, string, string) (net.Conn, error) { return client, nil }
	r, err := NewConsumer("t", "c", cfg)
	require.NoError(t, err)
	r.SetLogger(nil, LogLevelError)
	var handled atomic.Int64
	done := make(chan struct{})
	r.AddConcurrentHandlers(HandlerFunc(func(*Message) error {
		if handled.Add(1) == messages {
			close(done)
		}
		return nil
	}), 4)
	require.NoError(t, r.ConnectToNSQD("nsqd-1:4150"))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	close(begin)
	select {
	case <-done:
	case <-time.After(time.Minute):
		require.FailNow(t, "not all messages are handled", "%d, %+v", handled.Load(), r.Status())
	}
	runtime.ReadMemStats(&after)
	_ = server.Close() // or the stop would wait for its CLOSE_WAIT
	r.Stop()
	<-r.StopChan
	perMessage := float64(after.Mallocs-before.Mallocs) / messages
	t.Logf("%.3f allocations and %d bytes per message", perMessage, (after.TotalAlloc-before.TotalAlloc)/messages)
	require.Less(t, perMessage, 0.5)
}

// serveMessages is an nsqd that has all its messages ready, so that it allocates nothing while they are read.
func serveMessages(t *testing.T, nc net.Conn, messages int, begin <-chan struct{}) {
	defer nc.Close()
	var all []byte
	for i := range messages {
		id := benchID(uint64(i))
		data := binary.BigEndian.AppendUint16(make([]byte, 8, 200), 1)
		data = append(append(data, id[:]...), make([]byte, 100)...)
		all = append(all, benchFrame(FrameTypeMessage, data)...)
	}
	r := bufio.NewReader(nc)
	for _, step := range []string{"  V2IDENTIFY\n", "SUB t c\n", "RDY 2500\n"} {
		line, err := r.ReadString('\n')
		if !assert.NoError(t, err) || !assert.Equal(t, step, line) {
			return
		}
		switch step {
		case "  V2IDENTIFY\n":
			size := make([]byte, 4)
			_, _ = io.ReadFull(r, size)
			_, _ = r.Discard(int(binary.BigEndian.Uint32(size)))
			fallthrough
		case "SUB t c\n":
			_, _ = nc.Write(benchFrame(FrameTypeResponse, []byte("OK")))
		}
	}
	var reading sync.WaitGroup
	reading.Go(func() { _, _ = io.Copy(io.Discard, r) })
	<-begin
	_, _ = nc.Write(all)
	reading.Wait()
}
