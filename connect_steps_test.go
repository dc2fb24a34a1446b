package nsq

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// connectSteps are what nsqd can be silent, deaf or difficult at, in the order of a connect.
var connectSteps = []string{"dial", "IDENTIFY", "TLS", "SNAPPY", "DEFLATE", "AUTH", "SUB"}

// atStep is a consumer of n whose connects go through step, which fake nsqds take from handshakeSetups.
func atStep(t *testing.T, n *fakeNSQD, step string, tune func(cfg *Config)) *Consumer {
	setup := handshakeSetups[step]
	if setup.behave != nil {
		n.set(setup.behave)
	}
	return unconnected(t, n, func(cfg *Config) {
		cfg.MaxInFlight = 10
		if setup.tune != nil {
			setup.tune(cfg)
		}
		if tune != nil {
			tune(cfg)
		}
	})
}

// hangsAt has n stop in the middle of a connect.
func hangsAt(n *fakeNSQD, step string) {
	if step == "dial" {
		n.setReach(reachHangs)
		return
	}
	n.at(step, fakeStep{never: true})
}

// healed ends all trouble.
func healed(n *fakeNSQD) {
	n.set(func(b *fakeBehaviour) { clear(b.steps); b.refuseSubs, b.editIdentify = 0, nil })
	n.up()
}

// DisconnectFromNSQD and Stop end a connect at each of its steps, the first one as well as one that is made again, and
// leave nothing behind that would try again.
func TestConnectIsBrokenOffAtEachStep(t *testing.T) {
	t.Parallel()
	type end struct {
		act func(t *testing.T, r *Consumer, n *fakeNSQD)
		err error // of the first connect
	}
	ends := map[string]end{
		"Disconnect": {func(t *testing.T, r *Consumer, n *fakeNSQD) { require.NoError(t, r.DisconnectFromNSQD(n.addr)) }, ErrNotConnected},
		"Stop":       {func(t *testing.T, r *Consumer, n *fakeNSQD) { stopConsumer(t, r, idleStop) }, errConsumerStopped},
	}
	for _, step := range connectSteps {
		for call, end := range ends {
			for which, again := range map[string]bool{"first": false, "again": true} {
				t.Run(fmt.Sprintf("%s in %s, %s", call, step, which), func(t *testing.T) {
					inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
						r := atStep(t, n, step, func(cfg *Config) { cfg.DialTimeout = 0 })
						result := make(chan error, 1)
						if again {
							require.NoError(t, r.ConnectToNSQD(n.addr))
							hangsAt(n, step)
							n.dropAll()
							n.cluster.waitEntries(2, byKind(entryDialed))
							result <- end.err
						} else {
							hangsAt(n, step)
							go func() { result <- r.ConnectToNSQD(n.addr) }()
						}
						time.Sleep(time.Second)
						require.Equal(t, NodeConnecting, r.Status().NSQDs[0].State)
						start := time.Now()
						end.act(t, r, n)
						require.ErrorIs(t, <-result, end.err)
						synctest.Wait()
						require.Less(t, time.Since(start), 100*time.Millisecond)
						require.Zero(t, n.cluster.openConns())

						healed(n)
						dials := len(n.dialTimes())
						time.Sleep(time.Hour)
						require.Len(t, n.dialTimes(), dials)
						if call == "Disconnect" {
							require.NoError(t, r.ConnectToNSQD(n.addr), "as if nothing had been")
							n.publishN(3)
							n.cluster.waitUntil(func() bool { return n.stats().Finished == 3 })
						}
					})
				})
			}
		}
	}
}

// A connection that was there is made again for ever, whatever step of the new connects goes wrong, and how. There is
// no storm of tries meanwhile, and nothing is left of those that failed.
func TestReconnectOutlivesTroubleAtEachStep(t *testing.T) {
	t.Parallel()
	const outage = time.Minute
	troubles := map[string]fakeStep{
		"is never answered": {never: true},
		"is refused":        {err: "E_INVALID for a reason"},
		"ends it":           {hangUp: true},
		"gets nonsense":     {raw: []byte("\xff\xff\xff\xf0\x00\x00\x00\x07nonsense")},
		"gets half a frame": {raw: fakeHalfFrame},
	}
	for _, step := range connectSteps[1:] {
		for what, trouble := range troubles {
			t.Run(step+" "+what, func(t *testing.T) {
				inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
					r := atStep(t, n, step, func(cfg *Config) { cfg.ReadTimeout = 40 * time.Second })
					require.NoError(t, r.ConnectToNSQD(n.addr))
					time.Sleep(2 * time.Second)
					n.at(step, trouble)
					n.dropAll()
					time.Sleep(outage)
					require.Error(t, r.Status().NSQDs[0].LastError)
					tries := len(n.dialTimes()) - 1
					require.GreaterOrEqual(t, tries, 2)
					require.LessOrEqual(t, tries, 40, "5 in the first seconds, then one in 7.5 s on average")
					require.LessOrEqual(t, n.cluster.openConns(), 1)

					healed(n)
					start := time.Now()
					n.waitSubscribed()
					require.LessOrEqual(t, time.Since(start), r.config.ReadTimeout+r.config.MaxReconnectInterval)
					n.publishN(3)
					n.cluster.waitUntil(func() bool { return n.stats().Finished == 3 })
					require.Equal(t, 1, n.cluster.openConns())
					require.NoError(t, r.Status().NSQDs[0].LastError)
				})
			})
		}
	}
}

// Consumers that nsqd turns away together come back soon, but not together.
func TestConsumersThatAreRefusedComeBackOneByOne(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		const consumers = 10
		for range consumers {
			require.NoError(t, unconnected(t, n, nil).ConnectToNSQD(n.addr))
		}
		time.Sleep(5 * time.Second)
		n.set(func(b *fakeBehaviour) { b.refuseSubs = 3 * consumers })
		lost := time.Now()
		n.dropAll()
		n.cluster.waitUntil(func() bool { return n.stats().Conns == consumers && n.stats().RDY == consumers })
		require.LessOrEqual(t, time.Since(lost), 10*time.Second)
		gaps := nodeGaps(n.dialTimes()[consumers:])
		slices.Sort(gaps)
		require.Positive(t, gaps[len(gaps)/2], "no two at the same time, but by chance")
	})
}

// Flows that are idle for a while may be cut without a word, as NATs do: the consumer finds out by the missing heartbeat.
func TestIdleFlowsThatAreCutSilently(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		r := unconnected(t, n, func(cfg *Config) { cfg.HeartbeatInterval, cfg.ReadTimeout = time.Minute, time.Minute })
		require.NoError(t, r.ConnectToNSQD(n.addr))
		for i := range 5 {
			time.Sleep(30 * time.Second)
			n.set(func(b *fakeBehaviour) { b.silent = true }) // neither side is told
			n.stopReading()
			dials := len(n.dialTimes())
			n.cluster.waitEntries(dials+1, byKind(entryDialed))
			n.set(func(b *fakeBehaviour) { b.silent = false })
			n.startReading()
			n.waitSubscribed()
			n.publish("x")
			start := time.Now()
			n.cluster.waitUntil(func() bool { return n.stats().Finished == i+1 })
			require.LessOrEqual(t, time.Since(start), 90*time.Second)
		}
	})
}
