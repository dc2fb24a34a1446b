package nsq

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestStatusOfAFreshConsumer(t *testing.T) {
	r, err := NewConsumer("t", "c", NewConfig())
	require.NoError(t, err)
	require.Equal(t, ConsumerStatus{
		Topic: "t", Channel: "c", MaxInFlight: 1, NSQDs: []NSQDStatus{}, NSQLookupds: []NSQLookupdStatus{},
	}, r.Status())
	require.Equal(t, ConsumerStats{}, *r.Stats())
	require.NotSame(t, r.Stats(), r.Stats(), "a copy of the caller's own")
	require.False(t, r.IsStarved())
}

func TestStatusOfNSQDs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cluster := newFakeCluster(t, "a:4150", "b:4150", "c:4150", "d:4150")
		a, c, d := cluster.nsqd("a:4150"), cluster.nsqd("c:4150"), cluster.nsqd("d:4150")
		cluster.nsqd("b:4150").down()
		d.setReach(reachSilent)
		a.set(func(b *fakeBehaviour) { b.maxRDY = 100 })
		r := newTestConsumer(t, cluster, func(cfg *Config) { cfg.MaxInFlight = 20 })
		release := make(chan error)
		r.AddConcurrentHandlers(HandlerFunc(func(*Message) error { return <-release }), 2)
		defer stopConsumer(t, r, time.Minute)
		start := time.Now()
		require.NoError(t, r.ConnectToNSQD("a:4150"))
		refused := r.ConnectToNSQD("b:4150")
		require.NoError(t, r.ConnectToNSQD("c:4150"))
		time.Sleep(time.Second)
		go func() { _ = r.ConnectToNSQD("d:4150") }()
		a.publishN(5)
		time.Sleep(9 * time.Second)
		c.down()
		lost := time.Now()
		time.Sleep(30 * time.Second)

		s := r.Status()
		require.Equal(t, 20, s.MaxInFlight)
		require.Equal(t, []int{5, 3, 2}, []int{s.InFlight, s.Buffered, s.Running})
		require.False(t, s.Stopping)
		require.Len(t, s.NSQDs, 4)
		rowA, rowB, rowC, rowD := s.NSQDs[0], s.NSQDs[1], s.NSQDs[2], s.NSQDs[3]

		require.Equal(t, "a:4150", rowA.Address)
		require.Equal(t, NodeConnected, rowA.State)
		require.Equal(t, start, rowA.Since)
		require.EqualValues(t, 20, rowA.RDY)
		require.EqualValues(t, 100, rowA.MaxRDY)
		require.Equal(t, 5, rowA.InFlight)
		require.EqualValues(t, 5, rowA.MessagesReceived)
		require.WithinDuration(t, start.Add(time.Second), rowA.LastMessage, time.Millisecond)
		require.WithinDuration(t, start.Add(30*time.Second), rowA.LastHeartbeat, time.Millisecond)
		require.NoError(t, rowA.LastError)
		require.Zero(t, rowA.NextTry)
		require.Zero(t, rowA.Failures)
		require.False(t, rowA.Discovered || rowA.Closing)

		require.Equal(t, NodeFailed, rowB.State)
		require.Equal(t, refused, rowB.LastError)
		require.Equal(t, 1, rowB.Failures)
		require.Zero(t, rowB.NextTry)

		require.Equal(t, NodeWaiting, rowC.State)
		require.Error(t, rowC.LastError)
		require.Greater(t, rowC.Failures, 4)
		require.True(t, rowC.NextTry.After(time.Now()))
		require.WithinRange(t, rowC.Since, lost, time.Now())
		require.Zero(t, rowC.RDY)

		require.Equal(t, NodeConnecting, rowD.State)
		require.Equal(t, start.Add(time.Second), rowD.Since)

		release <- nil
		release <- errors.New("no")
		time.Sleep(time.Second)
		s = r.Status()
		require.Equal(t, []uint64{5, 1, 1}, []uint64{s.MessagesReceived, s.MessagesFinished, s.MessagesRequeued})
		require.Equal(t, ConsumerStats{MessagesReceived: 5, MessagesFinished: 1, MessagesRequeued: 1, Connections: 1}, *r.Stats())
		require.Equal(t, 1, s.BackoffLevel)
		require.False(t, s.BackoffProbing)
		require.WithinDuration(t, time.Now().Add(time.Second), s.BackoffUntil, time.Millisecond)
		close(release)
		time.Sleep(10 * time.Second)
		require.True(t, r.Status().BackoffProbing)
		require.Zero(t, r.Status().BackoffUntil)
		a.publish("probe")
		time.Sleep(time.Second)
		require.False(t, r.Status().BackoffProbing)
		require.Zero(t, r.Status().BackoffLevel)
		require.Zero(t, r.Status().BackoffUntil)

		r.ChangeMaxInFlight(0)
		require.Zero(t, r.Status().MaxInFlight)
		r.ChangeMaxInFlight(-7)
		require.Zero(t, r.Status().MaxInFlight)
		r.Stop()
		require.True(t, r.Status().Stopping)
	})
}

func TestStatusOfAConnectionThatIsBackAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNSQD(t)
		r := newDirectConsumer(t, n.cluster, nil)
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.publishN(3)
		n.cluster.waitUntil(func() bool { return n.stats().Finished == 3 })
		n.down()
		time.Sleep(10 * time.Second)
		require.Greater(t, r.Status().NSQDs[0].Failures, 2)
		require.Zero(t, r.Stats().Connections)
		n.up()
		n.waitSubscribed()
		n.publishN(2)
		n.cluster.waitUntil(func() bool { return n.stats().Finished == 5 })
		synctest.Wait()
		s := r.Status()
		row := s.NSQDs[0]
		require.Equal(t, NodeConnected, row.State)
		require.Zero(t, row.Failures, "none in a row")
		require.NoError(t, row.LastError)
		require.EqualValues(t, 2, row.MessagesReceived, "of the present connection")
		require.EqualValues(t, 5, s.MessagesReceived, "of all")
		require.EqualValues(t, 5, s.MessagesFinished)
		require.Equal(t, ConsumerStats{MessagesReceived: 5, MessagesFinished: 5, Connections: 1}, *r.Stats())
	})
}

func TestStatusOfLookupds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lookupds := newFakeLookupds(t, "l1:4161", "l2:4161", "l3:4161")
		lookupds.at("l1:4161").list("nsqd-1:4150", "nsqd-2:4150")
		lookupds.at("l2:4161").broken()
		lookupds.at("l3:4161").hangs()
		cluster := newFakeCluster(t, "nsqd-1:4150", "nsqd-2:4150")
		r := newDiscoveringConsumer(t, cluster, lookupds, nil)
		start := time.Now()
		require.NoError(t, r.ConnectToNSQLookupds([]string{"l1:4161", "http://user:passw0rd@l2:4161/lookup?dc=a", "l3:4161"}))
		s := r.Status().NSQLookupds
		require.Len(t, s, 3)
		require.Equal(t, NSQLookupdStatus{Address: "l1:4161", LastAnswer: start, NSQDs: []string{"nsqd-1:4150", "nsqd-2:4150"}}, s[0])
		require.Equal(t, "http://xxxxx@l2:4161/lookup?dc=a", s[1].Address)
		require.Equal(t, 1, s[1].Failures)
		var lerr *LookupdError
		require.ErrorAs(t, s[1].LastError, &lerr)
		require.Equal(t, 500, lerr.Status)
		require.NotContains(t, lerr.Error(), "passw0rd")
		require.Zero(t, s[1].LastAnswer)
		require.Equal(t, NSQLookupdStatus{Address: "l3:4161"}, s[2], "no answer yet")

		lookupds.at("l1:4161").refused()
		lookupds.at("l2:4161").notFound()
		time.Sleep(61 * time.Second)
		s = r.Status().NSQLookupds
		require.Error(t, s[0].LastError)
		require.Equal(t, start, s[0].LastAnswer)
		require.Equal(t, []string{"nsqd-1:4150", "nsqd-2:4150"}, s[0].NSQDs, "the last good answer stands")
		require.NoError(t, s[1].LastError, "that a topic is unknown is a good answer")
		require.Equal(t, start.Add(time.Minute), s[1].LastAnswer)
		require.Zero(t, s[1].Failures)

		// A snapshot is the caller's own.
		s[0].NSQDs[0] = "changed"
		require.Equal(t, "nsqd-1:4150", r.Status().NSQLookupds[0].NSQDs[0])
	})
}

func TestIsStarved(t *testing.T) {
	tests := map[string]struct {
		maxInFlight, messages int
		paused                bool
		want                  bool
	}{
		"nothing in flight":          {maxInFlight: 20, messages: 0, want: false},
		"84 %":                       {maxInFlight: 25, messages: 21, want: false},
		"85 %":                       {maxInFlight: 20, messages: 17, want: true},
		"all":                        {maxInFlight: 20, messages: 30, want: true},
		"one of one":                 {maxInFlight: 1, messages: 1, want: true},
		"paused with some in flight": {maxInFlight: 20, messages: 1, paused: true, want: true},
		"paused with none in flight": {maxInFlight: 20, messages: 0, paused: true, want: false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newFakeNSQD(t)
				r := newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.MaxInFlight = tt.maxInFlight })
				release := make(chan struct{})
				r.AddHandler(HandlerFunc(func(*Message) error {
					<-release
					return nil
				}))
				require.NoError(t, r.ConnectToNSQD(n.addr))
				n.publishN(tt.messages)
				time.Sleep(time.Second)
				if tt.paused {
					r.ChangeMaxInFlight(0)
					time.Sleep(time.Second)
				}
				require.Equal(t, tt.want, r.IsStarved())
				r.Stop() // a closing connection does not count
				synctest.Wait()
				require.False(t, r.IsStarved())
				close(release)
				stopConsumer(t, r, time.Minute)
			})
		})
	}
}
