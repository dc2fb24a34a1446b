package e2e

import (
	"errors"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
	"github.com/stretchr/testify/require"
)

// cluster is three nsqds behind two nsqlookupds: each knows two of them, and one nsqd is known to both.
type cluster struct {
	lookupds [2]*nsqtest.NSQLookupd
	nsqds    [3]*nsqtest.NSQD
}

func startCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{}
	for i := range c.lookupds {
		c.lookupds[i] = nsqtest.StartNSQLookupd(t)
	}
	a, b := c.lookupds[0].TCPAddr(), c.lookupds[1].TCPAddr()
	for i, lookupds := range [][]string{{a}, {b}, {a, b}} {
		c.nsqds[i] = nsqtest.StartNSQD(t, nsqtest.NSQDOptions{LookupdTCPAddresses: lookupds})
		require.NoError(t, c.nsqds[i].CreateChannel(topic, channel))
	}
	for _, l := range c.lookupds {
		awaitListed(t, l, 2)
	}
	return c
}

func (c *cluster) nodes() (nodes []node) {
	for _, n := range c.nsqds {
		nodes = append(nodes, n)
	}
	return nodes
}

func (c *cluster) addrs() (addrs []string) {
	for _, n := range c.nsqds {
		addrs = append(addrs, n.TCPAddr())
	}
	return addrs
}

func (c *cluster) lookupdAddrs() []string {
	return []string{c.lookupds[0].HTTPAddr(), c.lookupds[1].HTTPAddr()}
}

// awaitListed waits until an nsqlookupd lists so many nsqds for the topic.
func awaitListed(t *testing.T, l *nsqtest.NSQLookupd, producers int) {
	t.Helper()
	eventually(t, "nsqlookupd lists the nsqds", func() bool {
		result, err := l.Lookup(topic)
		if producers == 0 && errors.Is(err, nsqtest.ErrNotFound) {
			return true
		}
		return err == nil && len(result.Producers) == producers
	})
}

func TestThreeNSQDsBehindTwoLookupds(t *testing.T) {
	t.Parallel()
	cl := startCluster(t)
	l := newLedger(t)
	c := newConsumer(t, newConfig(10), l.handler(nil))
	start := time.Now()
	require.NoError(t, c.ConnectToNSQLookupds(cl.lookupdAddrs()))
	require.Less(t, time.Since(start), slack, "does not wait for the poll interval")
	require.Equal(t, 3, c.Stats().Connections, "all are connected when the call returns")
	awaitShares(t, cl.nodes(), 3, 3, 4)

	stopStream := l.stream(3*time.Millisecond, cl.nodes()...)
	l.awaitMore(500)
	awaitPolls(t, c, 3)
	stopStream()
	l.awaitAll()
	awaitDrained(t, cl.nodes()...)
	for i, n := range cl.nsqds {
		require.Len(t, channelStats(t, n).Clients, 1, "one connection to each")
		status := nsqdStatus(c, n.TCPAddr())
		require.True(t, status.Discovered)
		require.NoError(t, status.LastError, "nsqd %d", i)
	}
	require.Equal(t, 3, c.Stats().Connections)
}

func TestTopicThatComesLater(t *testing.T) {
	t.Parallel()
	lookupd := nsqtest.StartNSQLookupd(t)
	l := newLedger(t)
	c := newConsumer(t, newConfig(10), l.handler(nil))
	require.NoError(t, c.ConnectToNSQLookupd(lookupd.HTTPAddr()))
	require.NoError(t, c.Status().NSQLookupds[0].LastError, "an unknown topic is no error")
	for i := range 3 {
		n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{LookupdTCPAddresses: []string{lookupd.TCPAddr()}})
		l.publish(n, 20)
		l.awaitAll()
		require.Equal(t, i+1, c.Stats().Connections)
	}
}

func TestLookupdsAreDown(t *testing.T) {
	t.Parallel()
	cl := startCluster(t)
	l := newLedger(t)
	cfg := newConfig(10)
	cfg.VanishTimeout = 0 // by failed polls alone nobody vanishes
	c := newConsumer(t, cfg, l.handler(nil))
	require.NoError(t, c.ConnectToNSQLookupds(cl.lookupdAddrs()))
	awaitConnected(t, c, cl.addrs()...)
	stopStream := l.stream(5*time.Millisecond, cl.nodes()...)
	l.awaitMore(100)
	failures := func() (n int) {
		for _, s := range c.Status().NSQLookupds {
			n = max(n, s.Failures)
		}
		return n
	}

	require.NoError(t, cl.lookupds[0].Stop())
	eventually(t, "polls of the one have failed", func() bool { return failures() >= 5 })
	require.Equal(t, 3, c.Stats().Connections, "one is down: what it alone listed stays")
	require.NoError(t, cl.lookupds[1].Stop())
	eventually(t, "polls of both have failed", func() bool { return failures() >= 10 })
	require.Equal(t, 3, c.Stats().Connections, "all are down: everybody stays")
	for _, s := range c.Status().NSQLookupds {
		var failed *nsq.LookupdError
		require.ErrorAs(t, s.LastError, &failed)
	}
	l.awaitMore(100)

	for _, lookupd := range cl.lookupds {
		require.NoError(t, lookupd.Restart())
	}
	for _, n := range cl.nsqds {
		require.NoError(t, n.Announce())
	}
	for _, lookupd := range cl.lookupds {
		awaitListed(t, lookupd, 2)
	}
	awaitPolls(t, c, 5)
	late := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{LookupdTCPAddresses: []string{cl.lookupds[0].TCPAddr()}})
	l.publish(late, 10)
	awaitConnected(t, c, append(cl.addrs(), late.TCPAddr())...)
	l.awaitMore(100)
	for _, n := range cl.nsqds {
		require.Nil(t, nsqdStatus(c, n.TCPAddr()).LastError, "not one connection was lost")
	}
	stopStream()
	l.awaitAll()
}

// TestRestartedLookupdKnowsNobody: its good and empty answers don't cost a connection before vanish_timeout.
func TestRestartedLookupdKnowsNobody(t *testing.T) {
	t.Parallel()
	lookupd := nsqtest.StartNSQLookupd(t)
	n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{LookupdTCPAddresses: []string{lookupd.TCPAddr()}})
	require.NoError(t, n.CreateChannel(topic, channel))
	awaitListed(t, lookupd, 1)
	l := newLedger(t)
	c := newConsumer(t, newConfig(10), l.handler(nil))
	require.NoError(t, c.ConnectToNSQLookupd(lookupd.HTTPAddr()))
	awaitConnected(t, c, n.TCPAddr())
	since := nsqdStatus(c, n.TCPAddr()).Since

	require.NoError(t, lookupd.Restart())
	awaitListed(t, lookupd, 0)
	awaitPolls(t, c, 6)
	require.Equal(t, since, nsqdStatus(c, n.TCPAddr()).Since, "still the same connection")
	l.publish(n, 10)
	l.awaitAll()
}

// TestVanishedNSQD is not listed any more: closed gracefully, in time, with nothing left in flight.
func TestVanishedNSQD(t *testing.T) {
	t.Parallel()
	lookupd := nsqtest.StartNSQLookupd(t)
	n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{LookupdTCPAddresses: []string{lookupd.TCPAddr()}})
	require.NoError(t, n.CreateChannel(topic, channel))
	eventually(t, "nsqlookupd knows the channel: what is told later would list the nsqd again", func() bool {
		result, err := lookupd.Lookup(topic)
		return err == nil && len(result.Channels) == 1
	})
	l := newLedger(t)
	l.publish(n, 10)
	cfg := newConfig(10)
	cfg.VanishTimeout = 300 * time.Millisecond
	c := newConsumer(t, cfg, l.handler(nil))
	require.NoError(t, c.ConnectToNSQLookupd(lookupd.HTTPAddr()))
	l.awaitAll()
	require.NoError(t, lookupd.DeleteTopic(topic))
	start := time.Now()
	eventually(t, "the connection is closed", func() bool { return len(channelStats(t, n).Clients) == 0 })
	require.Greater(t, time.Since(start), 300*time.Millisecond-cfg.LookupdPollInterval)
	require.Zero(t, channelStats(t, n).InFlight)
	eventually(t, "the consumer has forgotten it", func() bool { return len(c.Status().NSQDs) == 0 })
}

// pollGate is an http.RoundTripper whose requests can be held up: nsqlookupd sets a tombstone without a lock, and while it does, it
// must not be asked, or the race detector fails the test.
type pollGate struct {
	mu        sync.RWMutex
	transport http.Transport
}

func (g *pollGate) RoundTrip(r *http.Request) (*http.Response, error) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.transport.RoundTrip(r)
}

// gatePolls makes a consumer ask its nsqlookupds through a gate.
func gatePolls(t *testing.T, c *nsq.Consumer) *pollGate {
	g := &pollGate{}
	c.SetLookupdHttpClient(&http.Client{Transport: g, Timeout: patience})
	t.Cleanup(g.transport.CloseIdleConnections)
	return g
}

func (g *pollGate) tombstone(t *testing.T, lookupd *nsqtest.NSQLookupd, nsqdHTTPAddr string) {
	t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	require.NoError(t, lookupd.Tombstone(topic, nsqdHTTPAddr))
}

// TestTombstone: an operator hides an nsqd, and its connections end; it is not connected to from memory, but when it is
// listed again.
func TestTombstone(t *testing.T) {
	t.Parallel()
	lookupd := nsqtest.StartNSQLookupd(t, nsqtest.NSQLookupdOptions{TombstoneLifetime: 3 * time.Second})
	proxy := nsqtest.StartProxy(t, "127.0.0.1:1")
	n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{LookupdTCPAddresses: []string{lookupd.TCPAddr()}, BroadcastTCPAddr: proxy.Addr()})
	proxy.SetTarget(n.TCPAddr())
	l := newLedger(t)
	l.publish(n, 10)
	awaitListed(t, lookupd, 1)
	c := newConsumer(t, newConfig(5), l.handler(nil))
	gate := gatePolls(t, c)
	require.NoError(t, c.ConnectToNSQLookupd(lookupd.HTTPAddr()))
	l.awaitAll()
	result, err := lookupd.Lookup(topic)
	require.NoError(t, err)

	gate.tombstone(t, lookupd, result.Producers[0].HTTPAddr())
	awaitListed(t, lookupd, 0)
	awaitPolls(t, c, 2)
	require.Equal(t, 1, c.Stats().Connections, "a tombstone alone closes nothing")
	require.Equal(t, 1, proxy.Cut())
	awaitPolls(t, c, 5)
	require.EqualValues(t, 1, proxy.Accepted(), "not from memory")
	l.publish(n, 10)
	awaitListed(t, lookupd, 1) // the tombstone is over
	l.awaitAll()
	require.EqualValues(t, 2, proxy.Accepted())
}

// TestDeletedTopicStaysDeleted is what tombstones are for: the consumer does not create the topic again.
func TestDeletedTopicStaysDeleted(t *testing.T) {
	t.Parallel()
	cl := startCluster(t)
	l := newLedger(t)
	c := newConsumer(t, newConfig(10), l.handler(nil))
	gate := gatePolls(t, c)
	require.NoError(t, c.ConnectToNSQLookupds(cl.lookupdAddrs()))
	awaitConnected(t, c, cl.addrs()...)
	n := cl.nsqds[0]
	for _, lookupd := range cl.lookupds {
		gate.tombstone(t, lookupd, n.HTTPAddr())
	}
	awaitListed(t, cl.lookupds[0], 1)
	awaitPolls(t, c, 2) // no answer from before the tombstone is on its way
	require.NoError(t, n.DeleteTopic(topic))
	eventually(t, "the connection has ended", func() bool { return c.Stats().Connections == 2 })
	awaitPolls(t, c, 6)
	_, err := n.TopicStats(topic)
	require.ErrorIs(t, err, nsqtest.ErrNotFound)
	require.Equal(t, 2, c.Stats().Connections)
	l.publish(cl.nsqds[1], 10)
	l.publish(cl.nsqds[2], 10)
	l.awaitAll()
}

func TestTCPPortAsLookupdAddress(t *testing.T) {
	t.Parallel()
	n := nsqtest.StartNSQD(t)
	lookupd := nsqtest.StartNSQLookupd(t)
	l := newLedger(t)
	c := newConsumer(t, newConfig(1), l.handler(nil))
	require.NoError(t, c.ConnectToNSQLookupds([]string{n.TCPAddr(), lookupd.HTTPAddr()}))
	rows := c.Status().NSQLookupds
	var failed *nsq.LookupdError
	require.ErrorAs(t, rows[0].LastError, &failed)
	require.ErrorIs(t, rows[0].LastError, nsq.ErrNotLookupd)
	require.NoError(t, rows[1].LastError)

	// The right one beside it is enough.
	listed := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{LookupdTCPAddresses: []string{lookupd.TCPAddr()}})
	l.publish(listed, 5)
	l.awaitAll()
}
