package e2e

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nsqio/nsq/nsqd"
	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
	"github.com/stretchr/testify/require"
)

// names is the DNS of this process: what the library, left to itself, resolves names with.
var names = &dns{addrs: make(map[string][]netip.Addr), dead: make(map[string]bool)}

func init() {
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: names.dial}
	// No test talks to anybody elsewhere, and a proxy would resolve names by itself.
	if err := os.Setenv("NO_PROXY", "*"); err != nil {
		panic(err)
	}
}

// dns answers questions for addresses of names that tests have set. It doesn't know any other name.
type dns struct {
	mu    sync.Mutex // guards the fields below
	addrs map[string][]netip.Addr
	dead  map[string]bool // no answer at all
}

// set makes a name stand for these addresses of IPv4, or for none.
func (d *dns) set(name string, addrs ...string) {
	var list []netip.Addr
	for _, addr := range addrs {
		list = append(list, netip.MustParseAddr(addr))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.addrs[name], d.dead[name] = list, false
}

// kill leaves questions for a name without an answer.
func (d *dns) kill(name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dead[name] = true
}

// dial returns a connection to a name server: what is no net.PacketConn speaks as over TCP, with the length before each message.
func (d *dns) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	client, server := net.Pipe()
	go func() {
		defer server.Close()
		for {
			var size [2]byte
			if _, err := io.ReadFull(server, size[:]); err != nil {
				return
			}
			question := make([]byte, binary.BigEndian.Uint16(size[:]))
			if _, err := io.ReadFull(server, question); err != nil {
				return
			}
			answer := d.answer(question)
			if answer == nil {
				_, _ = io.Copy(io.Discard, server) // until the client has waited for long enough
				return
			}
			if _, err := server.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...)); err != nil {
				return
			}
		}
	}()
	return client, nil
}

// answer makes an answer out of a question, both as RFC 1035 has them. It is nil if there is to be none.
func (d *dns) answer(question []byte) []byte {
	const header, typeA = 12, 1
	name, rest := "", question[header:]
	for rest[0] > 0 {
		name += string(rest[1:1+rest[0]]) + "."
		rest = rest[1+rest[0]:]
	}
	asked := binary.BigEndian.Uint16(rest[1:])
	d.mu.Lock()
	addrs, dead := d.addrs[strings.TrimSuffix(name, ".")], d.dead[strings.TrimSuffix(name, ".")]
	d.mu.Unlock()
	if dead {
		return nil
	}
	const noSuchName = 3
	flags := uint16(0x8180)
	if len(addrs) == 0 {
		flags |= noSuchName
	}
	if asked != typeA {
		addrs = nil
	}
	answer := slices.Clone(question[:2])
	answer = binary.BigEndian.AppendUint16(answer, flags)
	answer = append(answer, 0, 1, 0, byte(len(addrs)), 0, 0, 0, 0)
	answer = append(answer, question[header:len(question)-len(rest)+5]...)
	for _, addr := range addrs {
		answer = append(answer, 0xc0, header, 0, typeA, 0, 1, 0, 0, 0, 0, 0, 4) // the name of the question, for 0s
		answer = append(answer, addr.AsSlice()...)
	}
	return answer
}

// twoMachines are addresses of this machine that are as good as two machines.
func twoMachines(t *testing.T) (first, second string) {
	t.Helper()
	const another = "127.0.0.2"
	l, err := net.Listen("tcp", net.JoinHostPort(another, "0"))
	if err != nil {
		t.Skipf("THIS TEST IS NOT RUN: this system has no %s: %v", another, err)
	}
	require.NoError(t, l.Close())
	return "127.0.0.1", another
}

func portOf(t *testing.T, addr string) string {
	t.Helper()
	_, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	return port
}

// TestNameOfAnNSQDStandsForAnotherMachine: a direct address is a name, which is asked for at each connect, and at times can't be.
func TestNameOfAnNSQDStandsForAnotherMachine(t *testing.T) {
	t.Parallel()
	const name = "nsqd.e2e.test"
	first, second := twoMachines(t)
	a := nsqtest.StartNSQD(t)
	port := portOf(t, a.TCPAddr())
	b := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{TCPAddress: net.JoinHostPort(second, port)})
	require.NoError(t, b.CreateChannel(topic, channel))
	addr := net.JoinHostPort(name, port)
	cfg := newConfig(10)
	l := newLedger(t)
	c := newConsumer(t, cfg, l.handler(nil))
	lines := keepLog(t, c)
	names.set(name)
	var unknown *net.DNSError
	require.ErrorAs(t, c.ConnectToNSQD(addr), &unknown)
	names.set(name, first)
	require.NoError(t, c.ConnectToNSQD(addr))
	l.publish(a, 20)
	l.awaitAll()
	awaitDrained(t, a)

	away := map[string]func(to string){
		"another machine at once":      func(to string) { names.set(name, to) },
		"no such name":                 func(string) { names.set(name) },
		"no answer of the name server": func(string) { names.kill(name) },
		"a dead machine first":         func(string) { names.set(name, first, second) },
	}
	from, to, machines := a, b, []string{first, second}
	for what, happens := range away {
		happens(machines[1])
		l.publish(to, 20)
		require.NoError(t, from.Stop())
		if strings.HasPrefix(what, "no ") {
			eventually(t, "it has been looked for: "+what, func() bool {
				s := nsqdStatus(c, addr)
				return s.State != nsq.NodeConnected && errors.As(s.LastError, &unknown)
			})
			names.set(name, machines[1])
		}
		// A name server that does not answer takes dial_timeout.
		within(t, cfg.DialTimeout+cfg.MaxReconnectInterval+slack, "the other machine is connected: "+what, func() bool {
			return len(channelStats(t, to).Clients) == 1
		})
		l.awaitAll()
		awaitDrained(t, to)
		require.Len(t, c.Status().NSQDs, 1)
		require.Equal(t, addr, c.Status().NSQDs[0].Address)
		require.NoError(t, from.Restart())
		from, to = to, from
		slices.Reverse(machines)
	}
	require.Zero(t, lines.count("ERR"))
}

// TestStopWhileANameIsLookedUp does not wait for the name server.
func TestStopWhileANameIsLookedUp(t *testing.T) {
	t.Parallel()
	const name = "silence.e2e.test"
	names.kill(name)
	cfg := newConfig(1)
	cfg.DialTimeout = patience
	cfg.LookupdPollTimeout = patience
	c := newConsumer(t, cfg, newLedger(t).handler(nil))
	result := make(chan error, 2)
	go func() { result <- c.ConnectToNSQD(name + ":4150") }()
	go func() { result <- c.ConnectToNSQLookupd(name + ":4161") }()
	eventually(t, "the name is asked for", func() bool { return nsqdStatus(c, name+":4150").State == nsq.NodeConnecting })
	start := time.Now()
	stop(t, c)
	require.Less(t, time.Since(start), slack)
	for range 2 {
		receive(t, "the end of a connect", result)
	}
}

// TestNameOfALookupdStandsForAnotherMachine: the old one ends, and its successor knows of other nsqds.
func TestNameOfALookupdStandsForAnotherMachine(t *testing.T) {
	t.Parallel()
	const name = "lookupd.e2e.test"
	first, second := twoMachines(t)
	old := nsqtest.StartNSQLookupd(t)
	port := portOf(t, old.HTTPAddr())
	successor := nsqtest.StartNSQLookupd(t, nsqtest.NSQLookupdOptions{HTTPAddress: net.JoinHostPort(second, port)})
	n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{LookupdTCPAddresses: []string{old.TCPAddr(), successor.TCPAddr()}})
	late := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{LookupdTCPAddresses: []string{successor.TCPAddr()}})
	require.NoError(t, n.CreateChannel(topic, channel))
	require.NoError(t, late.CreateChannel(topic, channel))
	awaitListed(t, old, 1)
	awaitListed(t, successor, 2)
	names.set(name, first)
	cfg := newConfig(10)
	l := newLedger(t)
	c := newConsumer(t, cfg, l.handler(nil))
	require.NoError(t, c.ConnectToNSQLookupd(net.JoinHostPort(name, port)))
	awaitConnected(t, c, n.TCPAddr())
	stopStream := l.stream(5*time.Millisecond, n)
	l.awaitMore(20)

	names.set(name, second)
	require.NoError(t, old.Stop())
	within(t, cfg.LookupdPollInterval+slack, "the nsqd that the successor alone knows is connected", func() bool {
		return connected(c, late.TCPAddr())
	})
	l.publish(late, 10)
	l.awaitMore(20)
	stopStream()
	l.awaitAll()
	require.Nil(t, nsqdStatus(c, n.TCPAddr()).LastError, "no connection was lost")
}

// moved makes one nsqd of all addresses that it had, for the ledger.
func moved(h nsq.Handler) nsq.Handler {
	return nsq.HandlerFunc(func(m *nsq.Message) error {
		m.NSQDAddress = "wherever it is"
		return h.HandleMessage(m)
	})
}

// TestNSQDMoves to another port, with all it has, and tells nsqlookupd. Either the old connection ends, or nobody hears of the old
// address any more. The consumer moves with it, and the old address is given up.
func TestNSQDMoves(t *testing.T) {
	t.Parallel()
	tests := map[string]func(t *testing.T, old *nsqtest.Proxy){
		"and closes its connections": func(*testing.T, *nsqtest.Proxy) {},
		"and is not heard of again":  func(_ *testing.T, old *nsqtest.Proxy) { old.BlackHole(nsqtest.Both) },
		"and its address is refused": func(t *testing.T, old *nsqtest.Proxy) { require.NoError(t, old.Refuse()) },
	}
	for name, leave := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lookupd := nsqtest.StartNSQLookupd(t)
			old, next := nsqtest.StartProxy(t, "127.0.0.1:1"), nsqtest.StartProxy(t, "127.0.0.1:1")
			address := old.Addr()
			n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{
				LookupdTCPAddresses: []string{lookupd.TCPAddr()},
				BroadcastTCPAddr:    old.Addr(),
				Tune: func(o *nsqd.Options) { // at each start
					o.BroadcastTCPPort = int(netip.MustParseAddrPort(address).Port())
				},
			})
			old.SetTarget(n.TCPAddr())
			next.SetTarget(n.TCPAddr())
			require.NoError(t, n.CreateChannel(topic, channel))
			awaitListed(t, lookupd, 1)
			l := newLedger(t)
			cfg := newConfig(20)
			cfg.HeartbeatInterval = heartbeatInterval
			cfg.VanishTimeout = 0
			var holding atomic.Bool
			release := make(chan struct{})
			c := newConsumer(t, cfg, moved(l.handler(func(*nsq.Message, int) error {
				if holding.Load() {
					<-release
				}
				return nil
			})))
			letGo := sync.OnceFunc(func() { close(release) })
			t.Cleanup(letGo) // or the consumer would not stop
			lines := keepLog(t, c)
			require.NoError(t, c.ConnectToNSQLookupd(lookupd.HTTPAddr()))
			awaitConnected(t, c, old.Addr())
			l.publish(n, 1000)
			l.awaitMore(100)

			// An nsqd that is just about to send a message when it ends can lose it.
			holding.Store(true)
			l.publish(n, 2*cfg.MaxInFlight) // the others may all be handled by now
			eventually(t, "nsqd has sent all that it may", func() bool { return client(t, n).InFlight == int64(cfg.MaxInFlight) })
			l.fault("wherever it is", cfg.MaxInFlight+1)
			leave(t, old)
			address = next.Addr()
			require.NoError(t, n.Restart())
			l.publish(n, 20)
			awaitListed(t, lookupd, 1)
			within(t, cfg.LookupdPollInterval+slack, "the new address is connected", func() bool { return connected(c, next.Addr()) })
			holding.Store(false)
			letGo()
			// After the end of the connection, or its silence, or three polls that don't list it.
			within(t, 2*heartbeatInterval+slack, "the old address is given up", func() bool {
				return nsqdStatus(c, old.Addr()).State != nsq.NodeConnected && len(c.Status().NSQDs) == 1
			})
			l.awaitAll()
			awaitDrained(t, n)
			eventually(t, "the new address has the whole budget", func() bool { return rdyOf(n) == int64(cfg.MaxInFlight) })
			require.Zero(t, lines.count("ERR"))
		})
	}
}

// TestIPv6: addresses with colons in them, given directly or by nsqlookupd, with TLS for the address.
func TestIPv6(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skipf("THIS TEST IS NOT RUN: this system has no ::1: %v", err)
	}
	require.NoError(t, listener.Close())
	certs := nsqtest.TempCertificates(t)
	lookupd := nsqtest.StartNSQLookupd(t)
	addr := net.JoinHostPort("::1", portOf(t, nsqtest.StartProxy(t, "127.0.0.1:1").Addr())) // a number that nobody else takes
	n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{
		TCPAddress:          addr,
		BroadcastTCPAddr:    addr,
		LookupdTCPAddresses: []string{lookupd.TCPAddr()},
		Certificates:        certs,
	})
	require.Equal(t, addr, n.TCPAddr())
	require.NoError(t, n.CreateChannel(topic, channel))
	awaitListed(t, lookupd, 1)
	for name, connect := range map[string]func(*nsq.Consumer) error{
		"directly":        func(c *nsq.Consumer) error { return c.ConnectToNSQD(addr) },
		"from nsqlookupd": func(c *nsq.Consumer) error { return c.ConnectToNSQLookupd(lookupd.HTTPAddr()) },
	} {
		l := newLedger(t)
		cfg := newConfig(5)
		stack{tls: true}.configure(cfg, certs)
		c := newConsumer(t, cfg, l.handler(nil))
		require.NoError(t, connect(c))
		awaitConnected(t, c, addr)
		l.publish(n, 20)
		l.awaitAll()
		awaitDrained(t, n)
		require.Contains(t, client(t, n).RemoteAddress, "[::1]:", name)
		require.True(t, client(t, n).TLS, name)
		stop(t, c)
	}
}

// TestUnixSocket carries messages in every layer, and an nsqd that comes back is found again.
func TestUnixSocket(t *testing.T) {
	t.Parallel()
	certs := nsqtest.TempCertificates(t)
	path := filepath.Join(t.TempDir(), "nsqd.sock")
	n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{TCPAddress: path, Certificates: certs, MsgTimeout: 2 * time.Second})
	for name, s := range stacks {
		l := newLedger(t)
		cfg := newConfig(10)
		s.configure(cfg, certs) // the name in the certificate is localhost
		c := startConsumer(t, cfg, l.handler(nil), path)
		l.publish(n, 100)
		l.awaitAll()
		awaitDrained(t, n)
		require.Equal(t, s.tls, client(t, n).TLS, name)
		if name == "plain" {
			l.fault(path, cfg.MaxInFlight+1)
			require.NoError(t, n.Restart())
			within(t, cfg.MaxReconnectInterval+slack, "it is connected again", func() bool { return rdyOf(n) == int64(cfg.MaxInFlight) })
			l.publish(n, 100)
			l.awaitAll()
			awaitDrained(t, n)
		}
		stop(t, c)
	}
}

// TestLocalAddr is where connections come from, the first and those after it.
func TestLocalAddr(t *testing.T) {
	t.Parallel()
	_, second := twoMachines(t)
	n := nsqtest.StartNSQD(t)
	cfg := newConfig(5)
	require.NoError(t, cfg.Set("local_addr", second+":0"))
	l := newLedger(t)
	startConsumer(t, cfg, l.handler(nil), n.TCPAddr())
	for range 2 {
		l.publish(n, 10)
		l.awaitAll()
		awaitDrained(t, n)
		host, _, err := net.SplitHostPort(client(t, n).RemoteAddress)
		require.NoError(t, err)
		require.Equal(t, second, host)
		require.NoError(t, n.Restart())
		eventually(t, "it is connected again", func() bool { return rdyOf(n) == 5 })
	}
}
