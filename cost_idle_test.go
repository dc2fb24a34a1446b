package nsq

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// wireCalls counts what a consumer asks of its sockets.
type wireCalls struct{ dials, reads, writes, readDeadlines, writeDeadlines atomic.Int64 }

func (w *wireCalls) now() map[string]int64 {
	return map[string]int64{
		"dials": w.dials.Load(), "reads": w.reads.Load(), "writes": w.writes.Load(),
		"read deadlines": w.readDeadlines.Load(), "write deadlines": w.writeDeadlines.Load(),
	}
}

// countedWire is a socket whose calls are counted.
type countedWire struct {
	net.Conn
	calls *wireCalls
}

func (w *wireCalls) count(dial func(context.Context, string, string) (net.Conn, error)) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		w.dials.Add(1)
		nc, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return countedWire{nc, w}, nil
	}
}

func (c countedWire) Read(p []byte) (int, error) {
	defer c.calls.reads.Add(1)
	return c.Conn.Read(p)
}

func (c countedWire) Write(p []byte) (int, error) {
	c.calls.writes.Add(1)
	return c.Conn.Write(p)
}

func (c countedWire) SetReadDeadline(t time.Time) error {
	c.calls.readDeadlines.Add(1)
	return c.Conn.SetReadDeadline(t)
}

func (c countedWire) SetWriteDeadline(t time.Time) error {
	c.calls.writeDeadlines.Add(1)
	return c.Conn.SetWriteDeadline(t)
}

// rdySeal shows whether rdyLoop has looked at connections: each look writes anew what it wants to be told of, and so
// breaks the seal. On idle connections a sealed field has no effect.
type rdySeal []*Conn

func sealRDY(r *Consumer) rdySeal {
	seal := rdySeal(r.conns())
	for _, c := range seal {
		c.mu.Lock()
		c.lent = true
		c.mu.Unlock()
	}
	return seal
}

func (s rdySeal) broken() (n int) {
	for _, c := range s {
		c.mu.Lock()
		if !c.lent {
			n++
		}
		c.mu.Unlock()
	}
	return n
}

// An hour in which nothing happens takes heartbeats and lookups, and nothing else: per heartbeat one read and one write with
// their deadlines, per poll a request to each nsqlookupd. No command is sent, and rdyLoop does not even wake. All of this is counted
// exactly: the clock is the bubble's.
func TestAnIdleConsumerDoesNothing(t *testing.T) {
	const nsqds, heartbeats, polls = 10, 120, 60
	for name, before := range map[string]func(r *Consumer, cluster *fakeCluster){
		"that never had a message": func(*Consumer, *fakeCluster) {},
		"that had messages": func(_ *Consumer, cluster *fakeCluster) {
			for i := range nsqds {
				cluster.nsqd(bareAddr(i)).publishN(10 * i)
			}
		},
		"that is paused": func(r *Consumer, _ *fakeCluster) { r.ChangeMaxInFlight(0) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cluster := newFakeCluster(t, bareAddrs(nsqds)...)
				lookupds := newFakeLookupds(t, "l1:4161", "l2:4161")
				for _, l := range lookupds.servers {
					l.list(bareAddrs(nsqds)...)
				}
				var calls wireCalls
				r := newDiscoveringConsumer(t, cluster, lookupds, func(cfg *Config) { cfg.Dial = calls.count(cluster.Dial) })
				require.NoError(t, r.ConnectToNSQLookupds([]string{"l1:4161", "l2:4161"}))
				synctest.Wait()
				before(r, cluster)
				time.Sleep(time.Minute + 7*time.Second) // it has come to rest, and no heartbeat is due at this moment
				synctest.Wait()
				require.Len(t, r.conns(), nsqds)

				seal := sealRDY(r)
				callsBefore, asked := calls.now(), len(lookupds.asked(""))
				_, seq := cluster.since(0, nil)
				time.Sleep(time.Hour)
				synctest.Wait()

				happened := map[string]int{}
				entries, _ := cluster.since(seq, nil)
				for _, e := range entries {
					happened[fmt.Sprintf("%d %s", e.Kind, e.Line)]++
				}
				require.Equal(t, map[string]int{
					fmt.Sprintf("%d %s", entryResponse, heartbeat): nsqds * heartbeats,
					fmt.Sprintf("%d NOP", entryCommand):            nsqds * heartbeats,
				}, happened)
				made := calls.now()
				for what, n := range callsBefore {
					made[what] -= n
				}
				require.Equal(t, map[string]int64{
					"dials": 0, "reads": nsqds * heartbeats, "writes": nsqds * heartbeats,
					"read deadlines": nsqds * heartbeats, "write deadlines": nsqds * heartbeats,
				}, made)
				require.Equal(t, 2*polls, len(lookupds.asked(""))-asked)
				require.Zero(t, seal.broken(), "connections that rdyLoop has looked at")
				r.ChangeMaxInFlight(50)
				synctest.Wait()
				require.Equal(t, nsqds, seal.broken(), "a look breaks the seal")
			})
		})
	}
}
