package nsqtest

import (
	"io"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// listed tells which nsqds a lookup names.
func listed(t *testing.T, l *NSQLookupd, topic string) []string {
	t.Helper()
	result, err := l.Lookup(topic)
	if err != nil {
		require.ErrorIs(t, err, ErrNotFound)
		return nil
	}
	addrs := []string{}
	for _, p := range result.Producers {
		addrs = append(addrs, p.TCPAddr())
	}
	return addrs
}

func startPair(t *testing.T, l *NSQLookupd, topic string) (a, b *NSQD) {
	t.Helper()
	opts := NSQDOptions{LookupdTCPAddresses: []string{l.TCPAddr()}}
	a, b = StartNSQD(t, opts), StartNSQD(t, opts)
	require.NoError(t, a.CreateChannel(topic, "archive"))
	require.NoError(t, b.CreateTopic(topic))
	eventually(t, "both are listed", func() bool { return len(listed(t, l, topic)) == 2 })
	return a, b
}

func TestLookupdListsNSQDs(t *testing.T) {
	l := StartNSQLookupd(t)
	_, err := l.Lookup("events")
	require.ErrorIs(t, err, ErrNotFound)

	a, b := startPair(t, l, "events")
	require.ElementsMatch(t, []string{a.TCPAddr(), b.TCPAddr()}, listed(t, l, "events"))
	eventually(t, "the channel is listed", func() bool {
		result, err := l.Lookup("events")
		return err == nil && slices.Equal(result.Channels, []string{"archive"})
	})

	require.NoError(t, a.Stop())
	eventually(t, "a stopped nsqd is gone", func() bool { return len(listed(t, l, "events")) == 1 })
	require.Equal(t, []string{b.TCPAddr()}, listed(t, l, "events"))
	require.NoError(t, a.Restart())
	eventually(t, "a restarted nsqd is back", func() bool { return len(listed(t, l, "events")) == 2 })
}

func TestTombstoneHides(t *testing.T) {
	l := StartNSQLookupd(t)
	a, b := startPair(t, l, "events")
	require.NoError(t, l.Tombstone("events", a.HTTPAddr()))
	require.Equal(t, []string{b.TCPAddr()}, listed(t, l, "events"))

	nodes, err := l.Nodes()
	require.NoError(t, err)
	require.Len(t, nodes, 2)
	for _, node := range nodes {
		require.Equal(t, []bool{node.HTTPAddr() == a.HTTPAddr()}, node.Tombstones)
	}
}

func TestTombstoneLifetime(t *testing.T) {
	l := StartNSQLookupd(t, NSQLookupdOptions{TombstoneLifetime: time.Millisecond})
	a, _ := startPair(t, l, "events")
	require.NoError(t, l.Tombstone("events", a.HTTPAddr()))
	eventually(t, "the tombstone has gone", func() bool { return len(listed(t, l, "events")) == 2 })
}

func TestInactiveProducerTimeout(t *testing.T) {
	l := StartNSQLookupd(t, NSQLookupdOptions{InactiveProducerTimeout: 300 * time.Millisecond})
	n := StartNSQD(t, NSQDOptions{LookupdTCPAddresses: []string{l.TCPAddr()}})
	require.NoError(t, n.CreateTopic("events"))
	eventually(t, "the silent nsqd is known, but not listed", func() bool {
		addrs := listed(t, l, "events")
		return addrs != nil && len(addrs) == 0
	})
}

func TestLookupdRestartAndAnnounce(t *testing.T) {
	l := StartNSQLookupd(t)
	a, b := startPair(t, l, "events")
	tcp, http := l.TCPAddr(), l.HTTPAddr()

	require.NoError(t, l.Stop())
	require.NoError(t, l.Stop(), "a second time")
	_, err := l.Lookup("events")
	require.Error(t, err)
	require.NoError(t, l.Restart())
	require.Equal(t, []string{tcp, http}, []string{l.TCPAddr(), l.HTTPAddr()})
	require.Empty(t, listed(t, l, "events"))

	require.NoError(t, a.Announce())
	require.NoError(t, b.Announce())
	eventually(t, "both are back", func() bool { return len(listed(t, l, "events")) == 2 })
}

func TestLookupdAfterNSQD(t *testing.T) {
	addr, err := freeAddr()
	require.NoError(t, err)
	n := StartNSQD(t, NSQDOptions{LookupdTCPAddresses: []string{addr}})
	require.NoError(t, n.CreateTopic("events"))
	l := StartNSQLookupd(t, NSQLookupdOptions{TCPAddress: addr})
	require.NoError(t, n.Announce())
	eventually(t, "nsqd is listed", func() bool { return len(listed(t, l, "events")) == 1 })
}

func TestLookupdTopics(t *testing.T) {
	l, err := NewNSQLookupd(NSQLookupdOptions{})
	require.NoError(t, err)
	require.NoError(t, l.CreateTopic("events"))
	require.Equal(t, []string{}, listed(t, l, "events"))
	require.NoError(t, l.DeleteTopic("events"))
	require.Nil(t, listed(t, l, "events"))
	require.NoError(t, l.Close())
	require.ErrorIs(t, l.Restart(), ErrClosed)
}

func TestBroadcastAddress(t *testing.T) {
	l := StartNSQLookupd(t)
	n := StartNSQD(t, NSQDOptions{LookupdTCPAddresses: []string{l.TCPAddr()}, BroadcastTCPAddr: "127.0.0.1:9"})
	require.NoError(t, n.CreateTopic("events"))
	eventually(t, "nsqd is listed", func() bool { return len(listed(t, l, "events")) == 1 })
	require.Equal(t, []string{"127.0.0.1:9"}, listed(t, l, "events"))
}

// A stopped server must not go on answering those who are connected already.
func TestStoppedServersAnswerNobody(t *testing.T) {
	l, n := StartNSQLookupd(t), StartNSQD(t)
	client := &http.Client{Transport: &http.Transport{}, Timeout: patience}
	defer client.CloseIdleConnections()
	ping := func(addr string) error {
		resp, err := client.Get("http://" + addr + "/ping")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		_, err = io.Copy(io.Discard, resp.Body)
		return err
	}
	require.NoError(t, ping(l.HTTPAddr()))
	require.NoError(t, ping(n.HTTPAddr()))
	require.NoError(t, l.Stop())
	require.NoError(t, n.Stop())
	require.Error(t, ping(l.HTTPAddr()))
	require.Error(t, ping(n.HTTPAddr()))
}
