package main

import (
	"cmp"
	"crypto/tls"
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
	Topic                   string // that of the fakes if empty, and so Channel
	Channel                 string
	Handlers                int // 0: 4
	MaxInFlight             int
	TLS                     bool
	Snappy                  bool
	Deflate                 bool
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
	config.Snappy, config.Deflate, config.TlsV1 = c.Snappy, c.Deflate, c.TLS
	config.TlsConfig = &tls.Config{InsecureSkipVerify: true} // of use with TLS only
	if c.Unbuffered {
		config.OutputBufferSize, config.OutputBufferTimeout = -1, -1
	}
	config.HeartbeatInterval = cmp.Or(c.HeartbeatInterval, config.HeartbeatInterval)
	config.RDYTurnIdle = cmp.Or(c.RDYTurnIdle, config.RDYTurnIdle)
	config.RDYRedistributeInterval = cmp.Or(c.RDYRedistributeInterval, config.RDYRedistributeInterval)
	r, err := nsq.NewConsumer(cmp.Or(c.Topic, topic), cmp.Or(c.Channel, channel), config)
	if err != nil {
		return nil, err
	}
	r.SetLogger(nil, nsq.LogLevelError)
	r.AddConcurrentHandlers(nsq.HandlerFunc(func(m *nsq.Message) error { return handle(m.Body) }), cmp.Or(c.Handlers, handlers))
	return oursConsumer{r}, nil
}

func newGoNSQ(c consumerConfig, handle func(body []byte) error) (consumer, error) {
	config := gonsq.NewConfig()
	config.MaxInFlight = c.MaxInFlight
	config.Snappy, config.Deflate, config.TlsV1 = c.Snappy, c.Deflate, c.TLS
	config.TlsConfig = &tls.Config{InsecureSkipVerify: true} // of use with TLS only
	if c.Unbuffered {
		config.OutputBufferSize, config.OutputBufferTimeout = -1, -1
	}
	config.HeartbeatInterval = cmp.Or(c.HeartbeatInterval, config.HeartbeatInterval)
	r, err := gonsq.NewConsumer(cmp.Or(c.Topic, topic), cmp.Or(c.Channel, channel), config)
	if err != nil {
		return nil, err
	}
	r.SetLogger(nil, gonsq.LogLevelError)
	r.AddConcurrentHandlers(gonsq.HandlerFunc(func(m *gonsq.Message) error { return handle(m.Body) }), cmp.Or(c.Handlers, handlers))
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
