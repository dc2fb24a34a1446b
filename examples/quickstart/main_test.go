package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdyloop/nsq/nsqtest"
)

// output is what a run writes, safe to read while it does.
type output struct {
	mu  sync.Mutex // guards buf
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

func TestDemoHandlesEveryMessage(t *testing.T) {
	var stdout, stderr output
	code := run(t.Context(), nil, &stdout, &stderr)
	require.Zero(t, code, "%s%s", &stdout, &stderr)
	require.Contains(t, stdout.String(), "10000 of 10000 handled, 100 requeued, in ")
	require.Contains(t, stdout.String(), "  5000 handled\n", "progress")
	require.Empty(t, stderr.String())
}

func TestDemoFailsWhenNotEveryMessageWasHandled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	stdout := &cancelAt{text: []byte("  1000 handled\n"), cancel: cancel}
	var stderr output
	require.Equal(t, 1, run(ctx, []string{"-max-in-flight", "1"}, stdout, &stderr))
	require.Regexp(t, `[1-9]\d\d\d of 10000 handled, \d+ requeued`, stdout.String())
	require.Contains(t, stderr.String(), " messages were not handled\n")
}

// cancelAt cancels when a text is written.
type cancelAt struct {
	output
	text   []byte
	cancel context.CancelFunc
}

func (c *cancelAt) Write(p []byte) (int, error) {
	if bytes.Contains(p, c.text) {
		c.cancel()
	}
	return c.output.Write(p)
}

func TestConsumesFromAClusterUntilStopped(t *testing.T) {
	lookupd := nsqtest.StartNSQLookupd(t)
	nsqd := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{LookupdTCPAddresses: []string{lookupd.TCPAddr()}})

	for name, address := range map[string][]string{
		"found by nsqlookupds": {"-lookupd-http-address", lookupd.HTTPAddr(), "-lookupd-http-address", "http://" + unusedAddr(t)},
		"a direct nsqd":        {"-nsqd-tcp-address", nsqd.TCPAddr()},
	} {
		t.Run(name, func(t *testing.T) {
			topic := fmt.Sprintf("events-%d", len(address))
			require.NoError(t, nsqd.CreateChannel(topic, "archive"))
			for range 100 {
				require.NoError(t, nsqd.Publish(topic, []byte("hello")))
			}
			require.Eventually(t, func() bool { // or discovery has to wait for the next poll
				found, err := lookupd.Lookup(topic)
				return err == nil && len(found.Producers) == 1
			}, 10*time.Second, 10*time.Millisecond)

			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			var stdout, stderr output
			exited := make(chan int, 1)
			go func() {
				exited <- run(ctx, append(address, "-topic", topic, "-channel", "archive", "-max-in-flight", "10"), &stdout, &stderr)
			}()
			require.Eventually(t, func() bool {
				s, err := nsqd.ChannelStats(topic, "archive")
				return err == nil && len(s.Clients) == 1 && s.Clients[0].FinishCount == 100
			}, 20*time.Second, 10*time.Millisecond, "%s%s", &stdout, &stderr)
			stop()
			require.Zero(t, <-exited, "%s%s", &stdout, &stderr)
			require.Contains(t, stdout.String(), "100 messages handled, 0 requeued, ")

			s, err := nsqd.ChannelStats(topic, "archive")
			require.NoError(t, err)
			require.Zero(t, s.InFlight)
			require.Zero(t, s.Depth)
		})
	}
}

func TestUnreachableNSQDIsAnError(t *testing.T) {
	var stdout, stderr output
	require.Equal(t, 1, run(t.Context(), []string{"-nsqd-tcp-address", unusedAddr(t), "-topic", "events"}, &stdout, &stderr))
	require.Contains(t, stderr.String(), "quickstart: ")
}

// unusedAddr returns an address where nobody listens.
func unusedAddr(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

func TestRefusesBadFlags(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"unknown flag":          {[]string{"-topik", "events"}, "-topik"},
		"argument":              {[]string{"events"}, `"events" is not a flag`},
		"no number":             {[]string{"-max-in-flight", "many"}, `"many"`},
		"max-in-flight of 0":    {[]string{"-max-in-flight", "0"}, "-max-in-flight 0 is not above 0"},
		"topic without address": {[]string{"-topic", "events"}, "-topic needs"},
		"address without topic": {[]string{"-nsqd-tcp-address", "127.0.0.1:4150"}, `-topic ""`},
		"bad topic":             {[]string{"-nsqd-tcp-address", "127.0.0.1:4150", "-topic", "a b"}, `-topic "a b"`},
		"bad channel":           {[]string{"-channel", "a/b"}, `-channel "a/b"`},
		"both kinds of address": {[]string{"-nsqd-tcp-address", "a:1", "-lookupd-http-address", "a:2", "-topic", "events"}, "not both"},
		"nsqd without port":     {[]string{"-nsqd-tcp-address", "localhost", "-topic", "events"}, `"localhost"`},
		"lookupd without port":  {[]string{"-lookupd-http-address", "localhost", "-topic", "events"}, "missing port"},
		"lookupd with a word":   {[]string{"-lookupd-http-address", "localhost:http!", "-topic", "events"}, `"localhost:http!"`},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr output
			require.Equal(t, 2, run(t.Context(), c.args, &stdout, &stderr))
			require.Empty(t, stdout.String())
			require.Contains(t, stderr.String(), "quickstart: ")
			require.Contains(t, stderr.String(), c.want)
		})
	}
}

func TestHelpListsTheFlags(t *testing.T) {
	var stdout, stderr output
	require.Zero(t, run(t.Context(), []string{"-help"}, &stdout, &stderr))
	require.Contains(t, stderr.String(), "-lookupd-http-address host:port")
}
