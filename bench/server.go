package main

import (
	"context"
	"fmt"
	"os"
	"runtime/pprof"
	"strings"
	"time"

	"github.com/nsqio/nsq/nsqd"
	"github.com/rdyloop/nsq/bench/internal/fastnsqd"
	"github.com/rdyloop/nsq/nsqtest"
)

const (
	topic   = "bench"
	channel = "bench"
)

// serverConfig is what a server process is asked for first. It answers with its address. To the second question, whose content does
// not matter, it answers with the number of messages finished, once the consumer has gone; with an error unless that is all of them.
type serverConfig struct {
	Messages int
	BodySize int
	Profile  string // file to write a CPU profile of serving to; none if empty
}

// body is text that a compressor finds some repetition in, the same for all messages.
func body(size int) []byte {
	const text = `{"event":"order.created","id":"7c1f3a52-90de-4c0b-8d41-2f6e5b9a1c77","customer":48213,"total":"129.90"}` + "\n"
	return []byte(strings.Repeat(text, size/len(text)+1)[:size])
}

// profile begins a CPU profile, if a file is named.
func profile(file string) (end func(), err error) {
	if file == "" {
		return func() {}, nil
	}
	f, err := os.Create(file)
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, err
	}
	return func() {
		pprof.StopCPUProfile()
		_ = f.Close()
	}, nil
}

// fakeRole is the fast fake nsqd.
func fakeRole(ctx context.Context, p *parent) error {
	var cfg serverConfig
	if err := p.receive(&cfg); err != nil {
		return err
	}
	server, err := fastnsqd.Listen(cfg.Messages, body(cfg.BodySize))
	if err != nil {
		return err
	}
	defer server.Close()
	end, err := profile(cfg.Profile)
	if err != nil {
		return err
	}
	defer end()
	if err := p.send(server.Addr()); err != nil {
		return err
	}
	var report struct{}
	if err := p.receive(&report); err != nil {
		return err
	}
	finished, err := server.Wait(ctx)
	if err != nil {
		return err
	}
	return p.send(finished)
}

// mpubSize is the size of an MPUB when preloading; nsqd takes 5 MiB.
const mpubSize = 4 << 20

// nsqdRole is a real nsqd that has all messages in memory before it says its address.
func nsqdRole(ctx context.Context, p *parent) error {
	var cfg serverConfig
	if err := p.receive(&cfg); err != nil {
		return err
	}
	server, err := nsqtest.NewNSQD(nsqtest.NSQDOptions{
		MemQueueSize:             int64(cfg.Messages) + 1, // nothing goes to disk
		QueueScanInterval:        100 * time.Millisecond,  // nsqd's own defaults, which nsqtest shortens
		QueueScanRefreshInterval: 5 * time.Second,
		Tune:                     func(o *nsqd.Options) { o.SyncTimeout = time.Hour },
	})
	if err != nil {
		return err
	}
	defer server.Close()
	if err := preload(ctx, server, cfg); err != nil {
		return err
	}
	end, err := profile(cfg.Profile)
	if err != nil {
		return err
	}
	defer end()
	if err := p.send(server.TCPAddr()); err != nil {
		return err
	}
	var report struct{}
	if err := p.receive(&report); err != nil {
		return err
	}
	if err := drained(ctx, server, cfg.Messages); err != nil {
		return err
	}
	return p.send(cfg.Messages)
}

// preload publishes all messages and waits until they are in the channel.
func preload(ctx context.Context, server *nsqtest.NSQD, cfg serverConfig) error {
	if err := server.CreateChannel(topic, channel); err != nil {
		return err
	}
	text := body(cfg.BodySize)
	perMPUB := max(1, mpubSize/(len(text)+4))
	bodies := make([][]byte, min(perMPUB, cfg.Messages))
	for i := range bodies {
		bodies[i] = text
	}
	for left := cfg.Messages; left > 0; {
		n := min(left, len(bodies))
		if err := server.MultiPublish(topic, bodies[:n]); err != nil {
			return err
		}
		left -= n
	}
	return eventually(ctx, func() error {
		stats, err := server.ChannelStats(topic, channel)
		if err == nil && stats.Depth != int64(cfg.Messages) {
			err = fmt.Errorf("preloading: %d of %d messages are in the channel", stats.Depth, cfg.Messages)
		}
		return err
	})
}

// drained waits until the consumer has gone, and fails unless it has finished all messages, each at its first delivery.
func drained(ctx context.Context, server *nsqtest.NSQD, messages int) error {
	var stats nsqtest.ChannelStats
	err := eventually(ctx, func() (err error) {
		stats, err = server.ChannelStats(topic, channel)
		if err == nil && len(stats.Clients) > 0 {
			err = fmt.Errorf("the consumer is still there: %+v", stats)
		}
		return err
	})
	if err != nil {
		return err
	}
	if stats.Depth != 0 || stats.InFlight != 0 || stats.Deferred != 0 || stats.RequeueCount != 0 || stats.TimeoutCount != 0 {
		return fmt.Errorf("the consumer has gone, and has not finished all of %d messages: %+v", messages, stats)
	}
	return nil
}

// eventually calls check until it returns nil, and gives up after some seconds with its last error.
func eventually(ctx context.Context, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}
