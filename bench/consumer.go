package main

import (
	"cmp"
	"time"

	gonsq "github.com/nsqio/go-nsq"
	"github.com/rdyloop/nsq"
)

// consumer is one of either library, with what they have in common.
type consumer interface {
	ConnectToNSQDs([]string) error
	stop() // waits until it has stopped
}

// consumerConfig is how a consumer differs from its library's defaults. Zero fields don't, and the log is off.
type consumerConfig struct {
	Library                 string
	MaxInFlight             int
	Unbuffered              bool // nsqd's output buffer is off
	HeartbeatInterval       time.Duration
	RDYTurnIdle             time.Duration // of this library only
	RDYRedistributeInterval time.Duration // same
}

// newConsumer makes a consumer of the topic and channel, whose handlers call handle with the body of each message.
func newConsumer(c consumerConfig, handle func(body []byte) error) (consumer, error) {
	if c.Library == goNSQ {
		return newGoNSQ(c, handle)
	}
	return newOurs(c, handle)
}

// newOurs and newGoNSQ differ in nothing but the package, and options that go-nsq doesn't have.

func newOurs(c consumerConfig, handle func(body []byte) error) (consumer, error) {
	config := nsq.NewConfig()
	config.MaxInFlight = c.MaxInFlight
	if c.Unbuffered {
		config.OutputBufferSize, config.OutputBufferTimeout = -1, -1
	}
	config.HeartbeatInterval = cmp.Or(c.HeartbeatInterval, config.HeartbeatInterval)
	config.RDYTurnIdle = cmp.Or(c.RDYTurnIdle, config.RDYTurnIdle)
	config.RDYRedistributeInterval = cmp.Or(c.RDYRedistributeInterval, config.RDYRedistributeInterval)
	r, err := nsq.NewConsumer(topic, channel, config)
	if err != nil {
		return nil, err
	}
	r.SetLogger(nil, nsq.LogLevelError)
	r.AddConcurrentHandlers(nsq.HandlerFunc(func(m *nsq.Message) error { return handle(m.Body) }), handlers)
	return oursConsumer{r}, nil
}

func newGoNSQ(c consumerConfig, handle func(body []byte) error) (consumer, error) {
	config := gonsq.NewConfig()
	config.MaxInFlight = c.MaxInFlight
	if c.Unbuffered {
		config.OutputBufferSize, config.OutputBufferTimeout = -1, -1
	}
	config.HeartbeatInterval = cmp.Or(c.HeartbeatInterval, config.HeartbeatInterval)
	r, err := gonsq.NewConsumer(topic, channel, config)
	if err != nil {
		return nil, err
	}
	r.SetLogger(nil, gonsq.LogLevelError)
	r.AddConcurrentHandlers(gonsq.HandlerFunc(func(m *gonsq.Message) error { return handle(m.Body) }), handlers)
	return goNSQConsumer{r}, nil
}

type oursConsumer struct{ *nsq.Consumer }

func (c oursConsumer) stop() {
	c.Stop()
	<-c.StopChan
}

type goNSQConsumer struct{ *gonsq.Consumer }

func (c goNSQConsumer) stop() {
	c.Stop()
	<-c.StopChan
}
