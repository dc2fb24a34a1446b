package soak

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/rdyloop/nsq/nsqtest"
	"github.com/stretchr/testify/require"
)

const (
	numNSQDs    = 3
	numLookupds = 2
)

// cluster is nsqds as processes behind proxies, and nsqlookupds.
type cluster struct {
	nsqds    [numNSQDs]*nsqtest.NSQDProcess
	proxies  [numNSQDs]*nsqtest.Proxy
	lookupds [numLookupds]*nsqtest.NSQLookupd
	queries  [numLookupds]*nsqtest.Proxy // before the nsqlookupds' HTTP interfaces; for consumers alone
}

func startCluster(t *testing.T) *cluster {
	cl := &cluster{}
	t.Cleanup(func() { _ = cl.close() }) // again, if the test has not come so far
	for i := range cl.lookupds {
		l, err := nsqtest.NewNSQLookupd(nsqtest.NSQLookupdOptions{})
		require.NoError(t, err)
		cl.lookupds[i] = l
		p, err := nsqtest.NewProxy(l.HTTPAddr())
		require.NoError(t, err)
		cl.queries[i] = p
	}
	for i := range cl.nsqds {
		p, err := nsqtest.NewProxy("127.0.0.1:1")
		require.NoError(t, err)
		cl.proxies[i] = p
		n, err := nsqtest.NewNSQDProcess(nsqtest.NSQDOptions{
			BroadcastTCPAddr:    p.Addr(),
			LookupdTCPAddresses: cl.lookupdTCPAddrs(),
			// Much in memory, little, and nearly nothing.
			MemQueueSize: []int64{10000, 200, 10}[i],
		})
		require.NoError(t, err)
		cl.nsqds[i] = n
		p.SetTarget(n.TCPAddr())
		require.NoError(t, n.CreateChannel(topic, channel))
	}
	return cl
}

func (cl *cluster) lookupdTCPAddrs() (addrs []string) {
	for _, l := range cl.lookupds {
		addrs = append(addrs, l.TCPAddr())
	}
	return addrs
}

func (cl *cluster) lookupdHTTPAddrs() (addrs []string) {
	for _, p := range cl.queries {
		addrs = append(addrs, p.Addr())
	}
	return addrs
}

// addrs are what consumers connect to.
func (cl *cluster) addrs() (addrs []string) {
	for _, p := range cl.proxies {
		addrs = append(addrs, p.Addr())
	}
	return addrs
}

// close ends everything. It may be called twice.
func (cl *cluster) close() error {
	var errs []error
	for i := range cl.nsqds {
		if cl.proxies[i] != nil {
			errs = append(errs, cl.proxies[i].Close())
		}
		if cl.nsqds[i] != nil {
			errs = append(errs, cl.nsqds[i].Close())
		}
	}
	for i := range cl.lookupds {
		if cl.queries[i] != nil {
			errs = append(errs, cl.queries[i].Close())
		}
		if cl.lookupds[i] != nil {
			errs = append(errs, cl.lookupds[i].Close())
		}
	}
	return errors.Join(errs...)
}

// drained tells whether no nsqd has a message left, waiting, deferred or in flight.
func (cl *cluster) drained() (bool, string) {
	for i, n := range cl.nsqds {
		s, err := n.TopicStats(topic)
		if err != nil {
			return false, fmt.Sprintf("nsqd %d: %v", i, err)
		}
		for _, c := range s.Channels {
			if s.Depth > 0 || c.Depth > 0 || c.InFlight > 0 || c.Deferred > 0 {
				return false, fmt.Sprintf("nsqd %d: topic depth %d; channel depth %d, in flight %d, deferred %d; clients: %+v",
					i, s.Depth, c.Depth, c.InFlight, c.Deferred, c.Clients)
			}
		}
	}
	return true, ""
}

// publisher publishes at a bounded rate to all nsqds.
type publisher struct {
	soak  *soak
	until func() bool   // enough has been accepted
	pause time.Duration // between two batches to an nsqd
	wg    sync.WaitGroup
}

const (
	batchSize  = 50
	maxBacklog = 6000 // more would make a late start look like a stall
)

func (p *publisher) start(ctx context.Context) {
	for i := range p.soak.cluster.nsqds {
		p.wg.Go(func() { p.publish(ctx, i) })
	}
}

func (p *publisher) publish(ctx context.Context, nsqd int) {
	ticker := time.NewTicker(p.pause)
	defer ticker.Stop()
	for !p.until() {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		if p.soak.ledger.backlog() <= maxBacklog {
			p.soak.publish(nsqd, batchSize)
		}
	}
}

// publish offers messages to an nsqd at once. Without its word they may be there or not.
func (s *soak) publish(nsqd, n int) {
	first := s.ledger.offer(nsqd, n)
	bodies := make([][]byte, n)
	for i := range bodies {
		bodies[i] = body(first + i)
	}
	if s.cluster.nsqds[nsqd].MultiPublish(topic, bodies) == nil {
		s.ledger.accept(first, n)
	}
}
