package e2e

import (
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
	"github.com/stretchr/testify/require"
)

// stack is one way of layering a connection.
type stack struct{ tls, cert, snappy, deflate bool }

var stacks = map[string]stack{
	"plain":                  {},
	"TLS":                    {tls: true},
	"TLS client certificate": {tls: true, cert: true},
	"snappy":                 {snappy: true},
	"deflate":                {deflate: true},
	"TLS and snappy":         {tls: true, snappy: true},
	"TLS and deflate":        {tls: true, deflate: true},
}

// startNSQD starts an nsqd that offers the layers, and insists on the certificate if it is part of them.
func (s stack) startNSQD(t *testing.T, certs *nsqtest.Certificates, opts nsqtest.NSQDOptions) *nsqtest.NSQD {
	opts.Certificates = certs
	if s.cert {
		opts.TLSClientAuth = "require-verify"
	}
	return nsqtest.StartNSQD(t, opts)
}

func (s stack) configure(cfg *nsq.Config, certs *nsqtest.Certificates) {
	cfg.Snappy, cfg.Deflate, cfg.TlsV1 = s.snappy, s.deflate, s.tls
	switch {
	case s.cert:
		cfg.TlsConfig = certs.ClientConfig()
	case s.tls:
		cfg.TlsConfig = certs.AnonymousConfig()
	}
}

// inEveryStack runs a test in each layer stack, with an nsqd and a proxy before it.
func inEveryStack(t *testing.T, opts nsqtest.NSQDOptions,
	test func(t *testing.T, n *nsqtest.NSQD, p *nsqtest.Proxy, configure func(*nsq.Config) *nsq.Config)) {
	t.Parallel()
	certs := nsqtest.TempCertificates(t)
	for name, s := range stacks {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := s.startNSQD(t, certs, opts)
			require.NoError(t, n.CreateChannel(topic, channel))
			p := nsqtest.StartProxy(t, n.TCPAddr())
			test(t, n, p, func(cfg *nsq.Config) *nsq.Config {
				s.configure(cfg, certs)
				return cfg
			})
			for _, c := range channelStats(t, n).Clients {
				require.Equal(t, []bool{s.tls, s.snappy, s.deflate}, []bool{c.TLS, c.Snappy, c.Deflate}, "layers, as nsqd sees them")
			}
		})
	}
}

func TestEveryLayerStackCarriesMessages(t *testing.T) {
	inEveryStack(t, nsqtest.NSQDOptions{}, func(t *testing.T, n *nsqtest.NSQD, _ *nsqtest.Proxy, configure func(*nsq.Config) *nsq.Config) {
		l := newLedger(t)
		l.publish(n, 1000)
		startConsumer(t, configure(newConfig(50)), l.handler(nil), n.TCPAddr())
		l.awaitAll()
		awaitDrained(t, n)
		require.EqualValues(t, 1000, client(t, n).FinishCount)
		require.Zero(t, channelStats(t, n).TimeoutCount)
	})
}

// TestAnAnswerIsNotHeldBack: with compression, bytes can get stuck in the compressing writer of either end until more come.
func TestAnAnswerIsNotHeldBack(t *testing.T) {
	inEveryStack(t, nsqtest.NSQDOptions{}, func(t *testing.T, n *nsqtest.NSQD, _ *nsqtest.Proxy, configure func(*nsq.Config) *nsq.Config) {
		l := newLedger(t)
		cfg := configure(newConfig(1))
		cfg.HeartbeatInterval, cfg.ReadTimeout = 5*time.Second, 5*time.Second // an answer may be stuck in the handshake already
		startConsumer(t, cfg, l.handler(nil), n.TCPAddr())
		for i := range uint64(3) {
			l.publish(n, 1)
			within(t, slack, "nsqd has the answer to a single message", func() bool { return client(t, n).FinishCount == i+1 })
		}
	})
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rand.Uint32())
	}
	return b
}

func TestBigRandomBodiesInEveryLayerStack(t *testing.T) {
	inEveryStack(t, nsqtest.NSQDOptions{}, func(t *testing.T, n *nsqtest.NSQD, p *nsqtest.Proxy, configure func(*nsq.Config) *nsq.Config) {
		p.Trickle(nsqtest.ToClient, 4099, 0) // pieces that fit nowhere
		l := newLedger(t)
		startConsumer(t, configure(newConfig(3)), l.handler(nil), p.Addr())
		for _, size := range []int{300_000, 1, 700_001, 65_536, 1<<20 - numberLength} {
			require.NoError(t, l.offer(n, [][]byte{randomBytes(size)}))
		}
		l.awaitAll()
		awaitDrained(t, n)
		require.EqualValues(t, 1, p.Accepted())
	})
}

func TestTrickleByteByByteInEveryLayerStack(t *testing.T) {
	inEveryStack(t, nsqtest.NSQDOptions{}, func(t *testing.T, n *nsqtest.NSQD, p *nsqtest.Proxy, configure func(*nsq.Config) *nsq.Config) {
		p.Trickle(nsqtest.Both, 1, 0)
		l := newLedger(t)
		for range 20 {
			require.NoError(t, l.offer(n, [][]byte{randomBytes(rand.IntN(300))}))
		}
		startConsumer(t, configure(newConfig(5)), l.handler(nil), p.Addr())
		l.awaitAll()
		awaitDrained(t, n)
		require.EqualValues(t, 1, p.Accepted())
	})
}

func TestCutsAnywhereInEveryLayerStack(t *testing.T) {
	const cuts, maxInFlight = 6, 10
	opts := nsqtest.NSQDOptions{MsgTimeout: 2 * time.Second}
	inEveryStack(t, opts, func(t *testing.T, n *nsqtest.NSQD, p *nsqtest.Proxy, configure func(*nsq.Config) *nsq.Config) {
		l := newLedger(t)
		c := startConsumer(t, configure(newConfig(maxInFlight)), l.handler(nil), p.Addr())
		stopStream := l.stream(5*time.Millisecond, n)
		for i := range cuts {
			before := p.Accepted()
			l.fault(p.Addr(), maxInFlight+1)
			dir := nsqtest.ToClient
			if i%3 == 2 {
				dir = nsqtest.ToServer
			}
			p.CutAfter(dir, 1+rand.Int64N(5000)) // in the handshake, in a header, in a body
			eventually(t, "the consumer comes back", func() bool { return p.Accepted() > before })
		}
		awaitConnected(t, c, p.Addr())
		l.awaitMore(50)
		stopStream()
		l.awaitAll()
		awaitDrained(t, n)
	})
}

func TestClientCertificateIsMissing(t *testing.T) {
	t.Parallel()
	certs := nsqtest.TempCertificates(t)
	n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{Certificates: certs, TLSClientAuth: "require-verify"})
	cfg := newConfig(1)
	stack{tls: true}.configure(cfg, certs)
	err := newConsumer(t, cfg, newLedger(t).handler(nil)).ConnectToNSQD(n.TCPAddr())
	var refused *net.OpError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, "remote error", refused.Op, "nsqd's alert, not a closed connection: %v", err)
}

func TestServerOfAnotherCAIsNotTrusted(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{Certificates: nsqtest.TempCertificates(t)})
	cfg := newConfig(1)
	stack{tls: true, cert: true}.configure(cfg, nsqtest.TempCertificates(t))
	err := newConsumer(t, cfg, newLedger(t).handler(nil)).ConnectToNSQD(n.TCPAddr())
	require.ErrorContains(t, err, "x509")
	require.NoError(t, n.CreateChannel(topic, channel))
	require.Empty(t, channelStats(t, n).Clients)
}
