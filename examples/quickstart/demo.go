package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"strconv"
	"sync"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
)

const (
	demoTopic    = "quickstart"
	demoMessages = 10_000
	demoTimeout  = 30 * time.Second // far more than it takes
	failEvery    = 100              // each hundredth message fails at its first attempt
)

// demo publishes messages to an nsqd of its own and consumes them all. nsqd is found through an nsqlookupd, as in a real
// cluster.
func demo(ctx context.Context, o options, stdout, stderr io.Writer) (err error) {
	lookupd, err := nsqtest.NewNSQLookupd(nsqtest.NSQLookupdOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lookupd.Close()) }()
	nsqd, err := nsqtest.NewNSQD(nsqtest.NSQDOptions{LookupdTCPAddresses: []string{lookupd.TCPAddr()}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, nsqd.Close()) }()
	fmt.Fprintf(stdout, "nsqd at %s, nsqlookupd at %s\n", nsqd.TCPAddr(), lookupd.HTTPAddr())

	if err := publish(nsqd); err != nil {
		return err
	}
	fmt.Fprintf(stdout, "%d messages published to topic %s\n", demoMessages, demoTopic)

	o.topic = demoTopic
	o.lookupds = addresses{lookupd.HTTPAddr()}
	work := &demoHandler{out: stdout, seen: make(map[int]bool), all: make(chan struct{})}
	begun := time.Now()
	consumer, err := start(ctx, o, work, log.New(stderr, "", log.LstdFlags), nsq.LogLevelWarning)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, demoTimeout)
	defer cancel()
	select {
	case <-work.all:
	case <-ctx.Done():
	}
	took := time.Since(begun)

	err = drain(consumer)
	handled, requeued := work.handled(), consumer.Stats().MessagesRequeued
	fmt.Fprintf(stdout, "%d of %d handled, %d requeued, in %s: %.0f a second\n",
		handled, demoMessages, requeued, took.Round(time.Millisecond), float64(handled)/took.Seconds())
	if handled < demoMessages {
		err = errors.Join(err, fmt.Errorf("%d messages were not handled", demoMessages-handled))
	}
	return err
}

// publish puts the numbers from 0 on into the topic.
func publish(nsqd *nsqtest.NSQD) error {
	const batch = 1000
	for first := 0; first < demoMessages; first += batch {
		bodies := make([][]byte, batch)
		for i := range bodies {
			bodies[i] = strconv.AppendInt(nil, int64(first+i), 10)
		}
		if err := nsqd.MultiPublish(demoTopic, bodies); err != nil {
			return err
		}
	}
	return nil
}

// demoHandler remembers which messages it has handled: NSQ delivers at least once, so a message may come twice.
type demoHandler struct {
	out io.Writer
	all chan struct{} // closed when every message was handled

	mu   sync.Mutex // guards seen and writes to out, since HandleMessage is called by many goroutines
	seen map[int]bool
}

// HandleMessage implements nsq.Handler.
func (h *demoHandler) HandleMessage(m *nsq.Message) error {
	number, err := strconv.Atoi(string(m.Body))
	if err != nil {
		return err // the message would come again after a while, and the consumer back off: see Config
	}
	if number%failEvery == 0 && m.Attempts == 1 {
		m.RequeueWithoutBackoff(0) // a failure that is no reason to slow down: it comes again at once
		return nil                 // and the message has its answer
	}

	h.mu.Lock()
	defer h.mu.Unlock()
	if h.seen[number] {
		return nil
	}
	h.seen[number] = true
	if n := len(h.seen); n%(demoMessages/10) == 0 {
		fmt.Fprintf(h.out, "%6d handled\n", n)
	}
	if len(h.seen) == demoMessages {
		close(h.all)
	}
	return nil
}

func (h *demoHandler) handled() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.seen)
}
