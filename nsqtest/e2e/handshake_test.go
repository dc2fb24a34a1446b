package e2e

import (
	"os"
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
	"github.com/stretchr/testify/require"
)

// What a TLS handshake begins with, from either side.
const (
	clientHello = "\x16\x03\x01"
	serverHello = "\x16\x03\x03"
)

// heldStep is a step of the handshake that one of the two sides never gets to see.
type heldStep struct {
	dir      nsqtest.Direction
	text     string
	step     string // as the library calls it
	tls      bool
	auth     bool
	compress bool
}

var heldSteps = map[string]heldStep{
	"IDENTIFY does not arrive":           {dir: nsqtest.ToServer, text: "IDENTIFY", step: "IDENTIFY"},
	"IDENTIFY is not answered":           {dir: nsqtest.ToClient, text: "{", step: "IDENTIFY"},
	"the first bytes of IDENTIFY's come": {dir: nsqtest.ToClient, text: `"version"`, step: "IDENTIFY"},
	"the client's hello does not arrive": {dir: nsqtest.ToServer, text: clientHello, step: "TLS", tls: true},
	"the server's hello is not answered": {dir: nsqtest.ToClient, text: serverHello, step: "TLS", tls: true},
	"compression is not confirmed":       {dir: nsqtest.ToClient, text: "\xff\x06\x00\x00sNaPpY", step: "snappy", compress: true},
	"AUTH does not arrive":               {dir: nsqtest.ToServer, text: "AUTH", step: "AUTH", auth: true},
	"AUTH is not answered":               {dir: nsqtest.ToClient, text: `"identity"`, step: "AUTH", auth: true},
	"SUB does not arrive":                {dir: nsqtest.ToServer, text: "SUB ", step: "SUB"},
	"SUB is not answered":                {dir: nsqtest.ToClient, text: "OK", step: "SUB"},
}

// configure makes the options of nsqds and the config of consumers that go through this step.
func (s heldStep) configure(t *testing.T) (nsqtest.NSQDOptions, *nsq.Config) {
	opts := nsqtest.NSQDOptions{MsgTimeout: 2 * time.Second}
	cfg := newConfig(10)
	cfg.HeartbeatInterval = heartbeatInterval
	cfg.ReadTimeout = heartbeatInterval
	if s.tls {
		opts.Certificates = nsqtest.TempCertificates(t)
		stack{tls: true}.configure(cfg, opts.Certificates)
	}
	if s.auth {
		opts.AuthHTTPAddresses = []string{nsqtest.StartAuthServer(t, nsqtest.Grant{Secret: "s"}).Addr()}
		cfg.AuthSecret = "s"
	}
	cfg.Snappy = s.compress
	return opts, cfg
}

// heldCase is what the tests below need for one step. They wait for all steps at the same time, so each has its phases.
type heldCase struct {
	heldStep
	name   string
	opts   nsqtest.NSQDOptions
	cfg    *nsq.Config
	nsqd   *nsqtest.NSQD
	proxy  *nsqtest.Proxy
	ledger *ledger
}

func startHeldCases(t *testing.T) (cases []*heldCase) {
	for name, s := range heldSteps {
		c := &heldCase{heldStep: s, name: name, ledger: newLedger(t)}
		c.opts, c.cfg = s.configure(t)
		c.nsqd = nsqtest.StartNSQD(t, c.opts)
		c.proxy = nsqtest.StartProxy(t, c.nsqd.TCPAddr())
		cases = append(cases, c)
	}
	return cases
}

// check says that a connect failed at the step.
func (c *heldCase) check(t *testing.T, err error) {
	t.Helper()
	var timeout *nsq.TimeoutError
	require.ErrorAs(t, err, &timeout, c.name)
	require.Equal(t, c.step, timeout.Step, c.name)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded, c.name)
}

// TestHandshakeIsNeverAnswered on the first connect: its error names the step after read_timeout, though heartbeats may come all
// the while, and nothing is left open.
func TestHandshakeIsNeverAnswered(t *testing.T) {
	t.Parallel()
	type result struct {
		err  error
		took time.Duration
	}
	cases := startHeldCases(t)
	results := make([]chan result, len(cases))
	for i, c := range cases {
		c.proxy.HoldAt(c.dir, c.text)
		consumer := newConsumer(t, c.cfg, c.ledger.handler(nil))
		results[i] = make(chan result, 1)
		go func() {
			start := time.Now()
			err := consumer.ConnectToNSQD(c.proxy.Addr())
			results[i] <- result{err, time.Since(start)}
		}()
	}
	for i, c := range cases {
		r := receive(t, "the result of the connect", results[i])
		c.check(t, r.err)
		require.GreaterOrEqual(t, r.took, c.cfg.ReadTimeout, c.name)
		require.Less(t, r.took, c.cfg.ReadTimeout+slack, c.name)
		require.NoError(t, c.proxy.Heal())
		eventually(t, "the connection is closed: "+c.name, func() bool { return c.proxy.Conns() == 0 })
		require.EqualValues(t, 1, c.proxy.Accepted(), c.name)
	}
}

// TestHandshakeIsNotAnsweredForAWhile on the way back to an nsqd: tries go on, another nsqd has the budget, and it is back as
// soon as it answers. A consumer that stops meanwhile does so at once.
func TestHandshakeIsNotAnsweredForAWhile(t *testing.T) {
	t.Parallel()
	cases := startHeldCases(t)
	others := make([]*nsqtest.NSQD, len(cases))
	consumers := make([]*nsq.Consumer, len(cases))
	stopping := make([]*nsq.Consumer, len(cases))
	logs := make([]*keptLog, len(cases))
	for i, c := range cases {
		others[i] = nsqtest.StartNSQD(t, c.opts)
		consumers[i] = startConsumer(t, c.cfg, c.ledger.handler(nil), c.proxy.Addr(), others[i].TCPAddr())
		logs[i] = keepLog(t, consumers[i])
		stopping[i] = startConsumer(t, c.cfg, c.ledger.handler(nil), c.proxy.Addr())
		c.ledger.publish(c.nsqd, 20)
		c.ledger.awaitAll()
	}
	for i, c := range cases {
		c.ledger.fault(c.proxy.Addr(), 2*(c.cfg.MaxInFlight+1))
		c.proxy.HoldAt(c.dir, c.text)
		c.proxy.Cut()
		c.ledger.publish(c.nsqd, 20)
		c.ledger.publish(others[i], 20)
	}
	for i, c := range cases {
		eventually(t, "both consumers have tried for the second time: "+c.name, func() bool { return c.proxy.Accepted() >= 6 })
		require.EqualValues(t, c.cfg.MaxInFlight, rdyOf(others[i]), "the other nsqd has the whole budget: %s", c.name)
		c.check(t, nsqdStatus(consumers[i], c.proxy.Addr()).LastError)
		start := time.Now()
		stop(t, stopping[i])
		require.Less(t, time.Since(start), slack, c.name)
	}
	healed := time.Now()
	for _, c := range cases {
		require.NoError(t, c.proxy.Heal())
	}
	for i, c := range cases {
		eventually(t, "it is connected again: "+c.name, func() bool { return connected(consumers[i], c.proxy.Addr()) })
		require.Less(t, time.Since(healed), c.cfg.ReadTimeout+c.cfg.MaxReconnectInterval+slack, c.name)
	}
	for i, c := range cases {
		c.ledger.awaitAll()
		awaitDrained(t, c.nsqd, others[i])
		require.Zero(t, logs[i].count("ERR"), c.name)
		require.LessOrEqual(t, logs[i].count("WRN"), 10, c.name)
	}
}

// TestSlowTLSHandshake is carried through if it is over within read_timeout. What trickles in does not extend that.
func TestSlowTLSHandshake(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		bytes int
		pause time.Duration
		ok    bool
	}{
		"in time":  {50, 5 * time.Millisecond, true},
		"too slow": {1, 5 * time.Millisecond, false}, // about 1KB comes from nsqd
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			certs := nsqtest.TempCertificates(t)
			n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{Certificates: certs})
			p := nsqtest.StartProxy(t, n.TCPAddr())
			cfg := newConfig(10)
			stack{tls: true}.configure(cfg, certs)
			cfg.HeartbeatInterval = heartbeatInterval
			cfg.ReadTimeout = 2 * heartbeatInterval
			l := newLedger(t)
			c := newConsumer(t, cfg, l.handler(nil))
			p.HoldAt(nsqtest.ToClient, serverHello)
			result := make(chan error, 1)
			start := time.Now()
			go func() { result <- c.ConnectToNSQD(p.Addr()) }()
			eventually(t, "IDENTIFY is answered", func() bool { return p.Bytes(nsqtest.ToClient) > 100 })
			p.Trickle(nsqtest.ToClient, test.bytes, test.pause)
			p.HoldAt(nsqtest.ToClient, "")
			err := receive(t, "the result of the connect", result)
			if test.ok {
				require.NoError(t, err)
				l.publish(n, 10)
				l.awaitAll()
				require.True(t, client(t, n).TLS)
				return
			}
			var timeout *nsq.TimeoutError
			require.ErrorAs(t, err, &timeout)
			require.Equal(t, "TLS", timeout.Step)
			require.GreaterOrEqual(t, time.Since(start), cfg.ReadTimeout)
			require.Less(t, time.Since(start), cfg.ReadTimeout+slack)
		})
	}
}
