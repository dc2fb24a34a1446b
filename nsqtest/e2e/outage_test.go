package e2e

import (
	"os"
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
	"github.com/stretchr/testify/require"
)

// outage is what the tests of restarts, crashes and freezes have in common: two nsqds as processes, of which the first will be in
// trouble, and a consumer of both.
type outage struct {
	ledger   *ledger
	consumer *nsq.Consumer
	victim   *nsqtest.NSQDProcess
	other    *nsqtest.NSQDProcess
}

const outageInFlight = 20

// inBothModes runs a test with the addresses given to the consumer, and with nsqlookupd.
func inBothModes(t *testing.T, opts nsqtest.NSQDOptions, test func(t *testing.T, o *outage)) {
	t.Parallel()
	for _, mode := range []string{"direct", "discovered"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			opts := opts
			lookupd := nsqtest.StartNSQLookupd(t)
			if mode == "discovered" {
				opts.LookupdTCPAddresses = []string{lookupd.TCPAddr()}
			}
			o := &outage{
				ledger: newLedger(t),
				victim: startOutageNSQD(t, opts),
				other:  startOutageNSQD(t, opts),
			}
			require.NoError(t, o.victim.CreateChannel(topic, channel))
			require.NoError(t, o.other.CreateChannel(topic, channel))
			cfg := newConfig(outageInFlight)
			cfg.HeartbeatInterval = heartbeatInterval
			o.consumer = newConsumer(t, cfg, o.ledger.handler(func(*nsq.Message, int) error {
				<-time.After(time.Millisecond) // so that there are some in flight at any time
				return nil
			}))
			if mode == "discovered" {
				awaitListed(t, lookupd, 2)
				require.NoError(t, o.consumer.ConnectToNSQLookupd(lookupd.HTTPAddr()))
			} else {
				require.NoError(t, o.consumer.ConnectToNSQDs([]string{o.victim.TCPAddr(), o.other.TCPAddr()}))
			}
			awaitConnected(t, o.consumer, o.victim.TCPAddr(), o.other.TCPAddr())
			test(t, o)
		})
	}
}

// startOutageNSQD starts an nsqd as a process. One that syncs each message keeps them in memory that the process's end
// leaves alone, if there is such a place: a disk can take 50 ms for each sync, and what is tested is not the disk.
func startOutageNSQD(t *testing.T, opts nsqtest.NSQDOptions) *nsqtest.NSQDProcess {
	t.Helper()
	if opts.SyncEvery == 1 {
		if dir, err := os.MkdirTemp("/dev/shm", "nsqtest"); err == nil {
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			opts.DataPath = dir
		}
	}
	return nsqtest.StartNSQDProcess(t, opts)
}

// fill publishes so much to the victim that it is busy for a while, and waits until it is.
func (o *outage) fill(t *testing.T, messages int) {
	t.Helper()
	l := o.ledger
	l.publish(o.victim, messages)
	l.awaitMore(200)
	// From here on whatever nsqd doesn't read of our answers makes it send messages again.
	l.fault(o.victim.TCPAddr(), outageInFlight+1)
}

// awaitNoticed waits until the consumer knows that the victim's connection is gone.
func (o *outage) awaitNoticed(t *testing.T, limit time.Duration) {
	t.Helper()
	within(t, limit, "the outage is noticed", func() bool { return !connected(o.consumer, o.victim.TCPAddr()) })
}

// goesOnElsewhere checks that the other nsqd's messages come as ever, under the whole budget.
func (o *outage) goesOnElsewhere(t *testing.T) {
	t.Helper()
	l := o.ledger
	first := l.next
	l.publish(o.other, 300)
	eventually(t, "messages of the other nsqd are handled", func() bool {
		for number := first; number < first+300; number++ {
			if hs := l.handlings(number); len(hs) == 0 || !hs[0].ended {
				return false
			}
		}
		return true
	})
	eventually(t, "the whole budget is there", func() bool { return rdyOf(o.other) == outageInFlight })
}

// recovers checks that the victim is consumed again.
func (o *outage) recovers(t *testing.T) {
	t.Helper()
	within(t, 5*time.Second, "the victim is connected again", func() bool { return connected(o.consumer, o.victim.TCPAddr()) })
	o.ledger.publish(o.victim, 100)
	o.ledger.publish(o.other, 100)
	awaitDrained(t, o.victim, o.other)
	require.Len(t, channelStats(t, o.victim).Clients, 1)
	require.Len(t, channelStats(t, o.other).Clients, 1)
	require.EqualValues(t, outageInFlight, rdyOf(o.victim)+rdyOf(o.other))
}

func TestNSQDIsRestarted(t *testing.T) {
	inBothModes(t, nsqtest.NSQDOptions{MsgTimeout: 5 * time.Second}, func(t *testing.T, o *outage) {
		for range 2 {
			o.fill(t, 3000)
			require.NoError(t, o.victim.Stop())
			o.awaitNoticed(t, slack)
			o.goesOnElsewhere(t)
			require.NoError(t, o.victim.Restart())
			o.recovers(t)
			o.ledger.awaitAll() // nothing is lost
		}
	})
}

func TestNSQDIsKilled(t *testing.T) {
	inBothModes(t, nsqtest.NSQDOptions{MsgTimeout: 5 * time.Second}, func(t *testing.T, o *outage) {
		o.fill(t, 8000) // a second of work, so that some are left, and all of it in memory
		require.NoError(t, o.victim.Kill())
		o.awaitNoticed(t, slack)
		lost := o.ledger.missing() // nsqd held them in memory
		require.NotEmpty(t, lost)
		o.goesOnElsewhere(t)
		require.NoError(t, o.victim.Restart())
		o.recovers(t)
		// Those that a handler had when the connection was lost may still be finished.
		require.Subset(t, lost, o.ledger.missing(), "nothing else is lost")
		o.ledger.checkAgain()
	})
}

func TestNSQDWithDiskQueueIsKilled(t *testing.T) {
	opts := nsqtest.NSQDOptions{MsgTimeout: 5 * time.Second, MemQueueSize: -1, SyncEvery: 1}
	inBothModes(t, opts, func(t *testing.T, o *outage) {
		o.fill(t, 600) // each costs several fsyncs

		require.NoError(t, o.victim.Kill())
		o.awaitNoticed(t, slack)
		o.goesOnElsewhere(t)
		require.NoError(t, o.victim.Restart())
		o.recovers(t)
		// In flight, or in the hands of one of nsqd's goroutines: the topic's, the channel's and the disk queue's.
		require.LessOrEqual(t, len(o.ledger.missing()), outageInFlight+4)
		o.ledger.checkAgain()
	})
}

func TestNSQDIsFrozen(t *testing.T) {
	needsFreeze(t)
	inBothModes(t, nsqtest.NSQDOptions{MsgTimeout: 3 * time.Second}, func(t *testing.T, o *outage) {
		o.fill(t, 3000)
		require.NoError(t, o.victim.Freeze())
		o.awaitNoticed(t, 2*heartbeatInterval+slack)
		require.ErrorIs(t, nsqdStatus(o.consumer, o.victim.TCPAddr()).LastError, nsq.ErrHeartbeatTimeout)
		o.goesOnElsewhere(t)
		require.NoError(t, o.victim.Thaw())
		o.recovers(t)
		o.ledger.awaitAll() // nothing is lost
	})
}
