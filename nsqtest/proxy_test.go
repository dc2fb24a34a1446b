package nsqtest

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A pair is the two ends of a proxied connection.
type pair struct {
	client, server *net.TCPConn
}

// pairs makes proxied connections on demand.
type pairs struct {
	proxy    *Proxy
	accepted chan *net.TCPConn
}

func newPairs(t *testing.T) *pairs {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &pairs{accepted: make(chan *net.TCPConn, 10)}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			nc, err := listener.Accept()
			if err != nil {
				return
			}
			p.accepted <- nc.(*net.TCPConn)
		}
	})
	t.Cleanup(func() { listener.Close(); wg.Wait() })
	p.proxy = StartProxy(t, listener.Addr().String())
	return p
}

func (p *pairs) dial(t *testing.T) *net.TCPConn {
	t.Helper()
	nc, err := net.DialTimeout("tcp", p.proxy.Addr(), patience)
	require.NoError(t, err)
	p.prepare(t, nc)
	return nc.(*net.TCPConn)
}

func (p *pairs) accept(t *testing.T) *net.TCPConn {
	t.Helper()
	select {
	case nc := <-p.accepted:
		p.prepare(t, nc)
		return nc
	case <-time.After(patience):
		require.FailNow(t, "no connection")
		return nil
	}
}

func (p *pairs) prepare(t *testing.T, nc net.Conn) {
	require.NoError(t, nc.SetDeadline(time.Now().Add(patience)))
	t.Cleanup(func() { nc.Close() })
}

func (p *pairs) open(t *testing.T) pair {
	t.Helper()
	c := p.dial(t)
	return pair{client: c, server: p.accept(t)}
}

func say(t *testing.T, nc net.Conn, text string) {
	t.Helper()
	_, err := io.WriteString(nc, text)
	require.NoError(t, err)
}

func hear(t *testing.T, nc net.Conn, want string) {
	t.Helper()
	got := make([]byte, len(want))
	_, err := io.ReadFull(nc, got)
	require.NoError(t, err)
	require.Equal(t, want, string(got))
}

// silence requires that nothing comes for a while.
func silence(t *testing.T, nc net.Conn) {
	t.Helper()
	require.NoError(t, nc.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	_, err := nc.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, nc.SetReadDeadline(time.Now().Add(patience)))
}

func wasReset(err error) bool {
	const wsaeConnReset = syscall.Errno(10054) // what Windows calls it
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, wsaeConnReset)
}

func TestProxyForwards(t *testing.T) {
	ps := newPairs(t)
	p := ps.open(t)
	say(t, p.client, "ping")
	hear(t, p.server, "ping")
	say(t, p.server, "pong!")
	hear(t, p.client, "pong!")
	eventually(t, "the bytes are counted", func() bool { return ps.proxy.Bytes(Both) == 9 })
	require.EqualValues(t, 4, ps.proxy.Bytes(ToServer))
	require.EqualValues(t, 5, ps.proxy.Bytes(ToClient))
	require.Equal(t, 1, ps.proxy.Conns())
	require.EqualValues(t, 1, ps.proxy.Accepted())

	// One direction ends, the other goes on.
	require.NoError(t, p.client.CloseWrite())
	_, err := p.server.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
	say(t, p.server, "late")
	hear(t, p.client, "late")
	require.NoError(t, p.server.Close())
	_, err = p.client.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
	eventually(t, "the connection is gone", func() bool { return ps.proxy.Conns() == 0 })
}

func TestProxyPassesMuch(t *testing.T) {
	p := newPairs(t).open(t)
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	var wg sync.WaitGroup
	wg.Go(func() {
		p.client.Write(data)
		p.client.CloseWrite()
	})
	got, err := io.ReadAll(p.server)
	wg.Wait()
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, got))
}

func TestProxyPassesReset(t *testing.T) {
	p := newPairs(t).open(t)
	require.NoError(t, p.client.SetLinger(0))
	require.NoError(t, p.client.Close())
	_, err := p.server.Read(make([]byte, 1))
	require.True(t, wasReset(err), "%v", err)
}

func TestProxyLatency(t *testing.T) {
	ps := newPairs(t)
	p := ps.open(t)
	const latency = 150 * time.Millisecond
	ps.proxy.Latency(ToServer, latency)

	start := time.Now()
	say(t, p.client, "slow")
	hear(t, p.server, "slow")
	require.GreaterOrEqual(t, time.Since(start), latency)

	start = time.Now()
	say(t, p.server, "fast")
	hear(t, p.client, "fast")
	require.Less(t, time.Since(start), latency, "the other direction has none")

	// Ten messages on their way at once take no longer than one.
	start = time.Now()
	for range 10 {
		say(t, p.client, "x")
		time.Sleep(5 * time.Millisecond) // so that each is a read of its own
	}
	hear(t, p.server, strings.Repeat("x", 10))
	require.GreaterOrEqual(t, time.Since(start), latency)
	require.Less(t, time.Since(start), 5*latency)
}

func TestProxyBlackHole(t *testing.T) {
	ps := newPairs(t)
	p := ps.open(t)
	ps.proxy.BlackHole(ToServer)
	say(t, p.client, "lost")
	silence(t, p.server)
	say(t, p.server, "still there")
	hear(t, p.client, "still there")

	require.NoError(t, p.client.CloseWrite())
	silence(t, p.server) // no end of the stream either
	require.NoError(t, ps.proxy.Heal())
	_, err := p.server.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
}

func TestProxyStallFillsBuffers(t *testing.T) {
	ps := newPairs(t)
	p := ps.open(t)
	ps.proxy.Stall(ToServer)

	// The sender gets stuck: it would take more than a second for this only if nobody read.
	data := bytes.Repeat([]byte("x"), 64<<20)
	require.NoError(t, p.client.SetWriteDeadline(time.Now().Add(time.Second)))
	sent, err := p.client.Write(data)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.Less(t, sent, len(data))
	silence(t, p.server)

	require.NoError(t, ps.proxy.Heal())
	_, err = io.CopyN(io.Discard, p.server, int64(sent))
	require.NoError(t, err, "nothing is lost")
}

func TestProxyTrickle(t *testing.T) {
	ps := newPairs(t)
	p := ps.open(t)
	ps.proxy.Trickle(ToClient, 2, 30*time.Millisecond)
	start := time.Now()
	say(t, p.server, "abcdef")
	buf := make([]byte, 6)
	n, err := p.client.Read(buf)
	require.NoError(t, err)
	require.Less(t, n, 6, "it comes in pieces")
	hear(t, p.client, "abcdef"[n:])
	require.GreaterOrEqual(t, time.Since(start), 60*time.Millisecond)

	ps.proxy.Trickle(ToClient, 0, 0)
	say(t, p.server, "whole")
	hear(t, p.client, "whole")
}

func TestProxyCutAfter(t *testing.T) {
	ps := newPairs(t)
	p := ps.open(t)
	ps.proxy.CutAfter(ToClient, 5)
	say(t, p.server, "abc")
	hear(t, p.client, "abc")
	say(t, p.server, "defg")
	got, err := io.ReadAll(p.client)
	require.Equal(t, "de", string(got))
	require.True(t, wasReset(err), "%v", err)
	_, err = p.server.Read(make([]byte, 1))
	require.True(t, wasReset(err), "%v", err)

	p = ps.open(t)
	say(t, p.server, "once only")
	hear(t, p.client, "once only")
}

func TestProxyHoldAt(t *testing.T) {
	tests := map[string]struct {
		sent   []string
		passed string
	}{
		"in the middle":      {[]string{"NOP\nSUB a b\nRDY 1\n"}, "NOP\n"},
		"at the start":       {[]string{"SUB a b\n"}, ""},
		"in pieces":          {[]string{"NOP\nS", "UB a b\n"}, "NOP\nS"},
		"what looks like it": {[]string{"SU", "NOP\n", "SU", "BTLE\n", "SUB a b\n"}, "SUNOP\nSUBTLE\n"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			ps := newPairs(t)
			p, second := ps.open(t), ps.open(t)
			ps.proxy.HoldAt(ToServer, "SUB ")
			passed := int64(0)
			for _, piece := range test.sent {
				say(t, p.client, piece)
				passed = min(passed+int64(len(piece)), int64(len(test.passed)))
				eventually(t, "the piece has passed", func() bool { return ps.proxy.Bytes(ToServer) == passed })
			}
			hear(t, p.server, test.passed)
			silence(t, p.server)
			say(t, p.client, "never before the rest")
			require.NoError(t, p.client.CloseWrite())
			silence(t, p.server)
			say(t, p.server, "the other direction goes on")
			hear(t, p.client, "the other direction goes on")

			say(t, second.client, "another: ")
			hear(t, second.server, "another: ")
			say(t, second.client, "SUB ")
			silence(t, second.server)

			require.NoError(t, ps.proxy.Heal())
			hear(t, p.server, strings.TrimPrefix(strings.Join(test.sent, ""), test.passed)+"never before the rest")
			_, err := p.server.Read(make([]byte, 1))
			require.ErrorIs(t, err, io.EOF)
			hear(t, second.server, "SUB ")
			say(t, second.client, "SUB again")
			hear(t, second.server, "SUB again")
		})
	}
}

func TestProxyCut(t *testing.T) {
	ps := newPairs(t)
	first, second := ps.open(t), ps.open(t)
	require.Equal(t, 2, ps.proxy.Cut())
	for _, nc := range []net.Conn{first.client, first.server, second.client, second.server} {
		_, err := nc.Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF)
	}
	require.Zero(t, ps.proxy.Conns())
	require.Zero(t, ps.proxy.Cut())

	p := ps.open(t)
	say(t, p.client, "again")
	hear(t, p.server, "again")
}

func TestProxyReset(t *testing.T) {
	ps := newPairs(t)
	p := ps.open(t)
	require.Equal(t, 1, ps.proxy.Reset())
	for _, nc := range []net.Conn{p.client, p.server} {
		_, err := nc.Read(make([]byte, 1))
		require.True(t, wasReset(err), "%v", err)
	}
}

func TestProxyHalfClose(t *testing.T) {
	ps := newPairs(t)
	p := ps.open(t)
	ps.proxy.HalfClose(ToClient)
	_, err := p.client.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
	say(t, p.server, "into the void")
	say(t, p.client, "still heard")
	hear(t, p.server, "still heard")
	require.Equal(t, 1, ps.proxy.Conns())
}

func TestProxyRefuse(t *testing.T) {
	ps := newPairs(t)
	p := ps.open(t)
	require.NoError(t, ps.proxy.Refuse())
	require.NoError(t, ps.proxy.Refuse(), "a second time")
	_, err := net.DialTimeout("tcp", ps.proxy.Addr(), patience)
	require.Error(t, err)
	say(t, p.client, "an open one goes on")
	hear(t, p.server, "an open one goes on")

	require.NoError(t, ps.proxy.Heal())
	p = ps.open(t)
	say(t, p.client, "a new one")
	hear(t, p.server, "a new one")
}

func TestProxySilent(t *testing.T) {
	ps := newPairs(t)
	ps.proxy.Silent()
	c := ps.dial(t)
	say(t, c, "hello?")
	silence(t, c)
	require.Empty(t, ps.accepted)
	require.NoError(t, ps.proxy.Heal())
	hear(t, ps.accept(t), "hello?")
}

func TestProxySetTarget(t *testing.T) {
	ps, other := newPairs(t), newPairs(t)
	p := ps.open(t)
	ps.proxy.SetTarget(other.proxy.Addr())
	say(t, p.client, "as before")
	hear(t, p.server, "as before")
	c := ps.dial(t)
	say(t, c, "elsewhere")
	hear(t, other.accept(t), "elsewhere")
}

func TestProxyWithoutTarget(t *testing.T) {
	addr, err := freeAddr()
	require.NoError(t, err)
	p := StartProxy(t, addr)
	nc, err := net.DialTimeout("tcp", p.Addr(), patience)
	if err == nil { // else the reset was even faster
		defer nc.Close()
		require.NoError(t, nc.SetDeadline(time.Now().Add(patience)))
		_, err = nc.Read(make([]byte, 1))
	}
	require.True(t, wasReset(err), "%v", err)
}

func TestProxyCloseEndsAll(t *testing.T) {
	faults := map[string]func(*Proxy){
		"none":       func(*Proxy) {},
		"latency":    func(p *Proxy) { p.Latency(Both, time.Hour) },
		"black hole": func(p *Proxy) { p.BlackHole(Both) },
		"stall":      func(p *Proxy) { p.Stall(Both) },
		"trickle":    func(p *Proxy) { p.Trickle(Both, 1, time.Hour) },
		"hold":       func(p *Proxy) { p.HoldAt(Both, "bytes") },
		"half close": func(p *Proxy) { p.HalfClose(Both) },
		"silent":     func(p *Proxy) { p.Silent() },
	}
	for name, fault := range faults {
		t.Run(name, func(t *testing.T) {
			ps := newPairs(t)
			p := ps.open(t)
			fault(ps.proxy)
			say(t, p.client, "some bytes")
			ps.dial(t)
			require.NoError(t, ps.proxy.Close())
			require.NoError(t, ps.proxy.Close(), "a second time")
			require.Zero(t, ps.proxy.Conns())
			require.ErrorIs(t, ps.proxy.Heal(), ErrClosed)
		})
	}
}

func TestProxyBeforeNSQD(t *testing.T) {
	n := StartNSQD(t)
	p := StartProxy(t, n.TCPAddr())
	w := dialWire(t, p.Addr())
	w.subscribe(t, "events", "archive", 1)
	p.CutAfter(ToClient, 20)
	require.NoError(t, n.Publish("events", []byte("cut in the middle of a frame")))
	_, err := w.frame()
	require.Error(t, err)
	eventually(t, "nsqd has noticed", func() bool {
		s, err := n.ChannelStats("events", "archive")
		return err == nil && len(s.Clients) == 0
	})
}
