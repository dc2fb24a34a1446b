package fleet

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/stretchr/testify/require"
)

// A test that waits for longer has failed.
func waitContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// ended is for a look without a wait.
func ended(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

func start(t *testing.T, n int) *Fleet {
	f, err := New(n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

// consume connects a consumer to the whole fleet. The test stops it.
func consume(t *testing.T, f *Fleet, change func(*nsq.Config)) *nsq.Consumer {
	cfg := nsq.NewConfig()
	change(cfg)
	r, err := nsq.NewConsumer("t", "c", cfg)
	require.NoError(t, err)
	r.SetLogger(nil, nsq.LogLevelError)
	r.AddConcurrentHandlers(nsq.HandlerFunc(func(*nsq.Message) error {
		time.Sleep(time.Millisecond) // so that a busy nsqd is one
		return nil
	}), 4)
	require.NoError(t, r.ConnectToNSQDs(f.Addrs()))
	return r
}

func stop(t *testing.T, f *Fleet, r *nsq.Consumer) {
	r.Stop()
	<-r.StopChan
	_, err := f.Counts()
	require.NoError(t, err, "the consumer broke the protocol")
	require.NoError(t, f.Gone(waitContext(t)))
}

func TestConnecting(t *testing.T) {
	f := start(t, 10)
	r := consume(t, f, func(cfg *nsq.Config) { cfg.MaxInFlight = 100 })
	require.NoError(t, f.Connected(waitContext(t)))
	d, err := f.Ready(waitContext(t))
	require.NoError(t, err)
	require.Positive(t, d)
	require.NoError(t, f.Quiet(waitContext(t), time.Millisecond))
	n, err := f.Counts()
	require.NoError(t, err)
	require.Equal(t, 10, n.Connections)
	require.Equal(t, 10, n.Subscribed)
	require.Equal(t, 10, n.Identifies)
	require.GreaterOrEqual(t, n.RDYs, 10)
	require.Positive(t, n.BytesIn)
	require.Positive(t, n.BytesOut)
	stop(t, f, r)

	_, err = f.Ready(ended(t))
	require.ErrorIs(t, err, context.Canceled, "the RDY of connections that have ended counts")
}

func TestABusyNSQDGetsWhatOthersDoNotUse(t *testing.T) {
	f := start(t, 4)
	r := consume(t, f, func(cfg *nsq.Config) {
		cfg.MaxInFlight = 20
		cfg.RDYRedistributeInterval = 20 * time.Millisecond
	})
	_, err := f.Ready(waitContext(t))
	require.NoError(t, err)
	d, err := f.Busy(waitContext(t), 2, 17)
	require.NoError(t, err)
	require.Positive(t, d)
	f.Idle()
	stop(t, f, r)
	n, err := f.Counts()
	require.NoError(t, err)
	require.GreaterOrEqual(t, n.Messages, 17)
	require.Equal(t, n.Messages, n.FINs+n.REQs, "a message without an answer")
}

func TestARoundOfTurns(t *testing.T) {
	f := start(t, 6)
	r := consume(t, f, func(cfg *nsq.Config) {
		cfg.MaxInFlight = 2
		cfg.RDYTurnIdle = 10 * time.Millisecond
		cfg.RDYTurnBusy = 10 * time.Millisecond
	})
	require.NoError(t, f.Connected(waitContext(t)))
	d, err := f.Round(waitContext(t))
	require.NoError(t, err)
	require.Positive(t, d)
	_, err = f.Round(ended(t))
	require.ErrorIs(t, err, context.Canceled, "a round does not begin anew")

	f.AllBusy()
	_, err = f.Round(waitContext(t))
	require.NoError(t, err)
	require.NoError(t, f.await(waitContext(t), func() bool { return f.counts.FINs >= len(f.nsqds) }))
	f.Idle()
	stop(t, f, r)
}

func TestHeartbeats(t *testing.T) {
	f := start(t, 3)
	r := consume(t, f, func(cfg *nsq.Config) { cfg.HeartbeatInterval = 100 * time.Millisecond })
	require.NoError(t, f.await(waitContext(t), func() bool { return f.counts.NOPs >= 3 }))
	n, err := f.Counts()
	require.NoError(t, err)
	require.GreaterOrEqual(t, n.Heartbeats, n.NOPs)
	stop(t, f, r)
}

func TestAWaitEnds(t *testing.T) {
	waits := map[string]func(context.Context, *Fleet) error{
		"for connections": func(ctx context.Context, f *Fleet) error { return f.Connected(ctx) },
		"for RDY": func(ctx context.Context, f *Fleet) error {
			_, err := f.Ready(ctx)
			return err
		},
		"for an RDY": func(ctx context.Context, f *Fleet) error {
			_, err := f.Busy(ctx, 0, 1)
			return err
		},
		"for a round": func(ctx context.Context, f *Fleet) error {
			_, err := f.Round(ctx)
			return err
		},
	}
	for name, wait := range waits {
		t.Run(name, func(t *testing.T) {
			require.ErrorIs(t, wait(ended(t), start(t, 1)), context.Canceled)
		})
	}
}

// A raw connection: what a consumer must not do.

func dial(t *testing.T, f *Fleet) net.Conn {
	nc, err := net.Dial("tcp", f.Addrs()[0])
	require.NoError(t, err)
	t.Cleanup(func() { _ = nc.Close() })
	require.NoError(t, nc.SetDeadline(time.Now().Add(30*time.Second)))
	return nc
}

func write(t *testing.T, nc net.Conn, text string) {
	_, err := nc.Write([]byte(text))
	require.NoError(t, err)
}

func readFrame(t *testing.T, r io.Reader) (frameType uint32, data []byte) {
	var head [8]byte
	_, err := io.ReadFull(r, head[:])
	require.NoError(t, err)
	data = make([]byte, binary.BigEndian.Uint32(head[:])-4)
	_, err = io.ReadFull(r, data)
	require.NoError(t, err)
	return binary.BigEndian.Uint32(head[4:]), data
}

const identify = "IDENTIFY\n\x00\x00\x00\x02{}"

func TestABreachOfTheProtocolFailsTheFleet(t *testing.T) {
	breaches := map[string]struct{ sent, want string }{
		"another protocol":               {"GET / HTTP/1.1\n", "magic"},
		"RDY before SUB":                 {"  V2RDY 1\n", "RDY before SUB"},
		"two SUBs":                       {"  V2SUB t c\nSUB t c\n", "second SUB"},
		"two CLS":                        {"  V2SUB t c\nCLS\nCLS\n", "second CLS"},
		"an RDY above the maximum":       {"  V2SUB t c\nRDY 2501\n", "RDY \"2501\""},
		"a negative RDY":                 {"  V2SUB t c\nRDY -1\n", "RDY \"-1\""},
		"a FIN for a message never sent": {"  V2SUB t c\nFIN 0000000000000001\n", "not in flight"},
		"a REQ for a message never sent": {"  V2SUB t c\nREQ 0000000000000001 0\n", "not in flight"},
		"no message ID":                  {"  V2SUB t c\nFIN 1\n", "message \"1\""},
		"an unknown command":             {"  V2SUB t c\nFLY\n", "command \"FLY\""},
		"a line without an end":          {"  V2" + string(make([]byte, 2*readBuffer)), "a line of more than"},
		"an IDENTIFY without JSON":       {"  V2IDENTIFY\n\x00\x00\x00\x01x", "IDENTIFY"},
		"an endless IDENTIFY":            {"  V2IDENTIFY\n\xff\xff\xff\xff", "IDENTIFY of 4294967295 bytes"},
	}
	for name, breach := range breaches {
		t.Run(name, func(t *testing.T) {
			f := start(t, 1)
			write(t, dial(t, f), breach.sent)
			err := f.await(waitContext(t), func() bool { return false })
			require.ErrorContains(t, err, breach.want)
		})
	}
}

func TestAMessageIsAnsweredOnce(t *testing.T) {
	f := start(t, 1)
	nc := dial(t, f)
	write(t, nc, "  V2"+identify+"SUB t c\nRDY 1\n")
	_, err := f.Busy(waitContext(t), 0, 1)
	require.NoError(t, err)
	write(t, nc, "FIN 0000000000000001\nFIN 0000000000000001\n")
	err = f.await(waitContext(t), func() bool { return false })
	require.ErrorContains(t, err, "message 0000000000000001, which is not in flight")
}

// RDY is how many messages may be in flight, and isn't used up.
func TestRDYIsACeiling(t *testing.T) {
	f := start(t, 1)
	nc := dial(t, f)
	r := bufio.NewReader(nc)
	write(t, nc, "  V2"+identify+"SUB t c\n")
	for _, want := range []string{string(identified), "OK"} {
		frameType, data := readFrame(t, r)
		require.EqualValues(t, frameResponse, frameType)
		require.Equal(t, want, string(data))
	}
	write(t, nc, "RDY 3\n")
	_, err := f.Busy(waitContext(t), 0, 3)
	require.NoError(t, err)
	message := func(id int) {
		frameType, data := readFrame(t, r)
		require.EqualValues(t, frameMessage, frameType)
		require.Len(t, data, messageSize-8)
		require.EqualValues(t, 1, binary.BigEndian.Uint16(data[8:]), "attempts")
		require.Equal(t, fmt.Sprintf("%016x", id), string(data[10:26]))
	}
	for id := range 3 {
		message(id + 1)
	}
	write(t, nc, "TOUCH 0000000000000003\nFIN 0000000000000002\n")
	message(4)
	write(t, nc, "RDY 1\nREQ 0000000000000003 0\nFIN 0000000000000001\n") // one is left
	require.NoError(t, nc.(*net.TCPConn).CloseWrite())
	_, err = io.ReadAll(r)
	require.NoError(t, err)
	require.NoError(t, f.Gone(waitContext(t)))
	n, err := f.Counts()
	require.NoError(t, err)
	require.Equal(t, 4, n.Messages)
	require.Equal(t, 2, n.FINs)
	require.Equal(t, 1, n.REQs)
	require.Equal(t, 1, n.TOUCHes)
}
