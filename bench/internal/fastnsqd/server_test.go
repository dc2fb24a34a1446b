package fastnsqd

import (
	"bufio"
	"compress/flate"
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/golang/snappy"
	"github.com/rdyloop/nsq"
	"github.com/stretchr/testify/require"
)

// rawConsumer speaks the protocol line by line.
type rawConsumer struct {
	t     *testing.T
	nc    net.Conn
	r     io.Reader
	w     io.Writer
	flush func() error
}

func dial(t *testing.T, s *Server) *rawConsumer {
	nc, err := net.Dial("tcp", s.Addr())
	require.NoError(t, err)
	t.Cleanup(func() { _ = nc.Close() })
	require.NoError(t, nc.SetDeadline(time.Now().Add(10*time.Second))) // only a failing test waits as long
	return &rawConsumer{t: t, nc: nc, r: nc, w: nc}
}

// subscribe is a consumer that has subscribed without any layer.
func subscribe(t *testing.T, s *Server) *rawConsumer {
	c := dial(t, s)
	c.send("  V2IDENTIFY\n\x00\x00\x00\x02{}")
	require.Equal(t, "OK", c.response())
	c.send("SUB t c\n")
	require.Equal(t, "OK", c.response())
	return c
}

func (c *rawConsumer) send(s string) {
	_, err := io.WriteString(c.w, s)
	require.NoError(c.t, err)
	if c.flush != nil {
		require.NoError(c.t, c.flush())
	}
}

func (c *rawConsumer) frame() (frameType int32, data []byte) {
	frameType, data, err := nsq.ReadUnpackedResponse(c.r)
	require.NoError(c.t, err)
	return frameType, data
}

func (c *rawConsumer) response() string {
	frameType, data := c.frame()
	require.Equal(c.t, nsq.FrameTypeResponse, frameType)
	return string(data)
}

// messages reads n messages and returns their IDs.
func (c *rawConsumer) messages(n int) (ids []string) {
	for range n {
		frameType, data := c.frame()
		require.Equal(c.t, nsq.FrameTypeMessage, frameType)
		m, err := nsq.DecodeMessage(data)
		require.NoError(c.t, err)
		require.Equal(c.t, "hello", string(m.Body))
		require.Equal(c.t, uint16(1), m.Attempts)
		ids = append(ids, string(m.ID[:]))
	}
	return ids
}

func (c *rawConsumer) finish(ids ...string) {
	var b strings.Builder
	for _, id := range ids {
		fmt.Fprintf(&b, "FIN %s\n", id)
	}
	c.send(b.String())
}

func listen(t *testing.T, messages int) *Server {
	s, err := Listen(messages, []byte("hello"))
	require.NoError(t, err)
	t.Cleanup(s.Close)
	return s
}

func TestAllMessagesFinishedOnce(t *testing.T) {
	s := listen(t, 1000)
	c := subscribe(t, s)
	c.send("RDY 10\n")
	seen := map[string]bool{}
	for range 1000 {
		id := c.messages(1)[0]
		require.False(t, seen[id])
		seen[id] = true
		c.finish(id)
	}
	c.send("CLS\n")
	require.Equal(t, "CLOSE_WAIT", c.response())
	require.NoError(t, c.nc.Close())
	n, err := s.Wait(t.Context())
	require.NoError(t, err)
	require.Equal(t, 1000, n)
}

// Whatever nsqd would send comes before CLOSE_WAIT here, as one goroutine writes both.
func TestNoMoreThanRDYIsInFlight(t *testing.T) {
	s := listen(t, 100)
	c := subscribe(t, s)
	c.send("RDY 5\n")
	ids := c.messages(5)
	c.finish(ids[3], ids[0])
	ids = append([]string{ids[1], ids[2], ids[4]}, c.messages(2)...) // without another RDY
	c.send("RDY 3\n")
	c.finish(ids[0], ids[1])
	c.finish(ids[2])
	ids = append(ids[3:], c.messages(1)...)
	require.Len(t, ids, 3)
	c.send("CLS\n")
	require.Equal(t, "CLOSE_WAIT", c.response())
}

func TestServerHasNoMoreThanRDYInFlightAtAnyTime(t *testing.T) {
	c := &conn{server: &Server{messages: 100}}
	for name, tc := range map[string]struct{ rdy, sent, finished, room int64 }{
		"before RDY":                        {0, 0, 0, 0},
		"nothing in flight":                 {7, 0, 0, 7},
		"some in flight":                    {7, 10, 5, 2},
		"all that RDY allows":               {7, 12, 5, 0},
		"more, since RDY was lowered":       {3, 12, 5, -4},
		"fewer messages are left than that": {50, 90, 80, 10},
		"all are sent":                      {50, 100, 80, 0},
	} {
		t.Run(name, func(t *testing.T) {
			c.rdy.Store(tc.rdy)
			c.sent.Store(tc.sent)
			c.finished.Store(tc.finished)
			require.Equal(t, tc.room, c.room())
		})
	}
}

func TestRunFails(t *testing.T) {
	for name, tc := range map[string]struct {
		say  func(ids []string) string // after five messages of ten
		want string
	}{
		"a FIN that comes twice":               {func(ids []string) string { return fin(ids[1]) + fin(ids[2]) + fin(ids[1]) }, "finished already"},
		"a FIN that comes twice after others":  {func(ids []string) string { return fin(ids[0]) + "NOP\n" + fin(ids[0]) }, "finished already"},
		"a FIN for a message that is not sent": {func([]string) string { return fin(idPrefix + "00000009") }, "not sent yet"},
		"a FIN for one that does not exist":    {func([]string) string { return fin(idPrefix + "ffffffff") }, "not sent yet"},
		"a FIN for an ID of somebody else":     {func([]string) string { return fin("0123456789abcdef") }, "names no message"},
		"a FIN for no ID":                      {func([]string) string { return fin(idPrefix + "0000000X") }, "names no message"},
		"a FIN with too short an ID":           {func(ids []string) string { return fin(ids[0][:15]) + fin(ids[1]) }, "names no message"},
		"a FIN with too long an ID":            {func(ids []string) string { return fin(ids[0] + "0") }, "names no message"},
		"a REQ":                                {func(ids []string) string { return "REQ " + ids[0] + " 0\n" }, "no place"},
		"a TOUCH":                              {func(ids []string) string { return "TOUCH " + ids[0] + "\n" }, "no place"},
		"RDY above the limit":                  {func([]string) string { return "RDY 2501\n" }, "out of range"},
		"RDY below zero":                       {func([]string) string { return "RDY -1\n" }, "out of range"},
		"a line without end":                   {func([]string) string { return strings.Repeat("x", 2000) }, "without end"},
		"an end with messages in flight":       {func(ids []string) string { return fin(ids[0]) }, "5 of 10 messages sent, 1 finished"},
		"an end within a command":              {func([]string) string { return "FI" }, `gone in "FI"`},
	} {
		t.Run(name, func(t *testing.T) {
			s := listen(t, 10)
			c := subscribe(t, s)
			c.send("RDY 5\n")
			ids := c.messages(5)
			c.send("RDY 0\n" + tc.say(ids))
			require.NoError(t, c.nc.(*net.TCPConn).CloseWrite())
			_, err := s.Wait(t.Context())
			require.ErrorContains(t, err, tc.want)
		})
	}
}

func TestLastMessageHasToBeFinishedToo(t *testing.T) {
	s := listen(t, 5)
	c := subscribe(t, s)
	c.send("RDY 5\n")
	c.finish(c.messages(5)[:4]...)
	require.NoError(t, c.nc.Close())
	_, err := s.Wait(t.Context())
	require.ErrorContains(t, err, "5 of 5 messages sent, 4 finished")
}

func fin(id string) string { return "FIN " + id + "\n" }

func TestUpgrades(t *testing.T) {
	for name, layers := range map[string][]string{
		"TLS":             {"tls_v1"},
		"snappy":          {"snappy"},
		"deflate":         {"deflate"},
		"TLS and snappy":  {"tls_v1", "snappy"},
		"TLS and deflate": {"tls_v1", "deflate"},
	} {
		t.Run(name, func(t *testing.T) {
			s := listen(t, 300)
			c := dial(t, s)
			asked := `{"feature_negotiation":true`
			for _, layer := range layers {
				asked += fmt.Sprintf(`,%q:true`, layer)
			}
			asked += "}"
			c.send("  V2IDENTIFY\n" + string(binary.BigEndian.AppendUint32(nil, uint32(len(asked)))) + asked)
			answer := c.response()
			for _, layer := range layers {
				require.Contains(t, answer, fmt.Sprintf(`%q:true`, layer))
				c.upgrade(layer)
				require.Equal(t, "OK", c.response())
			}
			c.send("SUB t c\n")
			require.Equal(t, "OK", c.response())
			c.send("RDY 100\n")
			for range 3 {
				c.finish(c.messages(100)...)
			}
			c.send("CLS\n")
			require.Equal(t, "CLOSE_WAIT", c.response())
			require.NoError(t, c.nc.Close())
			n, err := s.Wait(t.Context())
			require.NoError(t, err)
			require.Equal(t, 300, n)
		})
	}
}

func (c *rawConsumer) upgrade(layer string) {
	switch layer {
	case "tls_v1":
		c.nc = tls.Client(c.nc, &tls.Config{InsecureSkipVerify: true})
		c.r, c.w = c.nc, c.nc
	case "snappy":
		w := snappy.NewBufferedWriter(c.nc)
		c.r, c.w, c.flush = snappy.NewReader(c.nc), w, w.Flush
	case "deflate":
		w, err := flate.NewWriter(c.nc, 6)
		require.NoError(c.t, err)
		c.r, c.w, c.flush = flate.NewReader(bufio.NewReader(c.nc)), w, w.Flush
	}
}

func TestConnectingFails(t *testing.T) {
	for name, tc := range map[string]struct{ say, want string }{
		"no magic":              {"GET / HTTP/1.0\r\n\r\n", "magic"},
		"FIN before SUB":        {"  V2FIN 0123456789abcdef\n", "before SUB"},
		"IDENTIFY is no JSON":   {"  V2IDENTIFY\n\x00\x00\x00\x02{{", "IDENTIFY"},
		"both compressions":     {"  V2IDENTIFY\n\x00\x00\x00\x39" + `{"feature_negotiation":true,"snappy":true,"deflate":true}`, "both"},
		"it ends":               {"  V2", "EOF"},
		"IDENTIFY is too large": {"  V2IDENTIFY\n\xff\xff\xff\xff", "bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			s := listen(t, 1)
			c := dial(t, s)
			c.send(tc.say)
			require.NoError(t, c.nc.(*net.TCPConn).CloseWrite())
			_, err := s.Wait(t.Context())
			require.ErrorContains(t, err, tc.want)
		})
	}
}

func TestCloseEndsTheServer(t *testing.T) {
	for name, connect := range map[string]func(t *testing.T, s *Server){
		"before a consumer comes":  func(*testing.T, *Server) {},
		"while it connects":        func(t *testing.T, s *Server) { dial(t, s).send("  V2") },
		"when it has subscribed":   func(t *testing.T, s *Server) { subscribe(t, s) },
		"while it takes no answer": func(t *testing.T, s *Server) { subscribe(t, s).send("RDY 2500\n") },
	} {
		t.Run(name, func(t *testing.T) {
			s := listen(t, 1<<20)
			connect(t, s)
			s.Close()
			_, err := s.Wait(t.Context())
			require.Error(t, err)
		})
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := listen(t, 1).Wait(ctx)
	require.ErrorIs(t, err, context.Canceled)
}

func TestFramesHaveConsecutiveIDs(t *testing.T) {
	f := newFrames([]byte("x"))
	size := f.size
	for _, first := range []int64{0, 255, 65535, 1<<32 - 3} {
		data := f.from(first, 3)
		require.Len(t, data, 3*size)
		for i := range 3 {
			id := data[i*size+idOffset:][:16]
			n, ok := messageNumber(id)
			require.True(t, ok)
			require.Equal(t, first+int64(i), n)
			require.Equal(t, fmt.Sprintf("%s%08x", idPrefix, n), string(id))
		}
	}
}

func TestTooManyMessagesAreRefused(t *testing.T) {
	if math.MaxInt == math.MaxInt32 {
		t.Skip("an int can't be so large here")
	}
	most := int64(maxMessages)
	_, err := Listen(int(most+1), nil)
	require.Error(t, err)
}
