package main

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"runtime/pprof"
)

// The libraries.
const (
	ours  = "ours"
	goNSQ = "go-nsq"
)

// clientConfig is what a client process is asked to do: take WarmUp, then Count, then Rest messages, which is all there is. Count is what is
// measured; WarmUp must not be 0.
type clientConfig struct {
	Library     string
	Addr        string // of nsqd
	Topic       string
	Channel     string
	MaxInFlight int
	Handlers    int
	WarmUp      int
	Count       int
	Rest        int
	TLS         bool
	Snappy      bool
	Deflate     bool
	Heap        int    // MiB to hold besides
	Profile     string // file to write a CPU profile of the measured part to; none if empty
}

// clientRole consumes as it is told and answers with what it spent.
func clientRole(ctx context.Context, p *parent) error {
	var cfg clientConfig
	if err := p.receive(&cfg); err != nil {
		return err
	}
	s, err := consume(ctx, cfg)
	if err != nil {
		return err
	}
	return p.send(s)
}

func consume(ctx context.Context, cfg clientConfig) (s spent, err error) {
	start, ok := libraries[cfg.Library]
	if !ok {
		return spent{}, fmt.Errorf("no library %q", cfg.Library)
	}
	held := make([]byte, cfg.Heap<<20)
	defer runtime.KeepAlive(held)
	m := newMeter(cfg.WarmUp, cfg.Count)
	m.all += int64(cfg.Rest)
	if cfg.Profile != "" {
		f, err := os.Create(cfg.Profile)
		if err != nil {
			return spent{}, err
		}
		defer f.Close()
		defer pprof.StopCPUProfile()
		m.onStart = func() { _ = pprof.StartCPUProfile(f) } // fails only if one runs already
	}
	stop, err := start(cfg, m)
	if err != nil {
		return spent{}, err
	}
	if err := m.wait(ctx); err != nil {
		return spent{}, err // without stop, which may take its time when something is wrong
	}
	stop()
	return m.end.since(m.start), nil
}

// libraries are the ways to consume: each starts a consumer whose handlers count messages, and returns what stops it.
var libraries = map[string]func(cfg clientConfig, m *meter) (stop func(), err error){
	ours:  startConsumer,
	goNSQ: startConsumer,
	floor: startFloor,
}

// startConsumer starts one of the two libraries' consumers. Defaults hold, but for what the workload says, and the log is off.
func startConsumer(cfg clientConfig, m *meter) (stop func(), err error) {
	c, err := newConsumer(consumerConfig{
		Library: cfg.Library, Topic: cfg.Topic, Channel: cfg.Channel, Handlers: cfg.Handlers, MaxInFlight: cfg.MaxInFlight,
		TLS: cfg.TLS, Snappy: cfg.Snappy, Deflate: cfg.Deflate,
	}, func([]byte) error {
		m.one()
		return nil
	})
	if err != nil {
		return nil, err
	}
	if err := c.ConnectToNSQDs([]string{cfg.Addr}); err != nil {
		c.stop()
		return nil, err
	}
	return c.stop, nil
}
