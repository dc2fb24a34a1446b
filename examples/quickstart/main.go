// Quickstart consumes messages from NSQ.
//
// Without flags it needs nothing installed: it starts an nsqd and an nsqlookupd inside this process, publishes 10 000
// messages and consumes them. It exits 0 if every one of them was handled.
//
//	go run ./examples/quickstart
//
// With addresses it consumes from a real cluster until Ctrl-C, and finishes what it has begun before it exits:
//
//	go run ./examples/quickstart -lookupd-http-address 127.0.0.1:4161 -topic events
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/rdyloop/nsq"
)

// handlers is how many messages are worked on at the same time.
const handlers = 16

// drainTimeout is how long running handlers may take to finish once we stop.
const drainTimeout = 30 * time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the process at once
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// options are the command line.
type options struct {
	lookupds    addresses
	nsqds       addresses
	topic       string
	channel     string
	maxInFlight int
}

// addresses is a flag that may be given several times.
type addresses []string

func (a *addresses) String() string { return strings.Join(*a, ",") }

func (a *addresses) Set(addr string) error {
	*a = append(*a, addr)
	return nil
}

// usageError is a command line that can't be right.
type usageError struct{ error }

// run returns the exit code: 0 if all went well, 1 if it did not, 2 for a usageError.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	err := execute(ctx, args, stdout, stderr)
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return 0
	}
	fmt.Fprintln(stderr, "quickstart:", err)
	var usage usageError
	if errors.As(err, &usage) {
		return 2
	}
	return 1
}

func execute(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	switch {
	case err != nil:
		return err
	case o.cluster():
		return consume(ctx, o, stdout, stderr)
	default:
		return demo(ctx, o, stdout, stderr)
	}
}

// cluster reports whether there is a cluster to consume from.
func (o options) cluster() bool { return len(o.lookupds) > 0 || len(o.nsqds) > 0 }

func parse(args []string, stderr io.Writer) (o options, err error) {
	flags := flag.NewFlagSet("quickstart", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // run reports errors, once
	flags.Var(&o.lookupds, "lookupd-http-address", "`host:port` of an nsqlookupd's HTTP side (may be given several times)")
	flags.Var(&o.nsqds, "nsqd-tcp-address", "`host:port` of an nsqd's TCP side (may be given several times)")
	flags.StringVar(&o.topic, "topic", "", "`name` of the topic to consume; needed with an address")
	flags.StringVar(&o.channel, "channel", "quickstart#ephemeral", "`name` of the channel; an #ephemeral one goes with its last consumer")
	flags.IntVar(&o.maxInFlight, "max-in-flight", 200, "how many messages may be unanswered at a time, over all nsqds")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		flags.SetOutput(stderr)
		flags.Usage()
		return o, err
	case err != nil:
		return o, usageError{err}
	case flags.NArg() > 0:
		return o, usageError{fmt.Errorf("%q is not a flag", flags.Arg(0))}
	}
	if err := o.check(); err != nil {
		return o, usageError{err}
	}
	return o, nil
}

func (o options) check() error {
	switch {
	case len(o.lookupds) > 0 && len(o.nsqds) > 0:
		return errors.New("give -lookupd-http-address or -nsqd-tcp-address, not both")
	case o.cluster() && !nsq.IsValidTopicName(o.topic):
		return fmt.Errorf("-topic %q is not the name of a topic", o.topic)
	case !o.cluster() && o.topic != "":
		return errors.New("-topic needs -lookupd-http-address or -nsqd-tcp-address")
	case !nsq.IsValidChannelName(o.channel):
		return fmt.Errorf("-channel %q is not the name of a channel", o.channel)
	case o.maxInFlight < 1:
		return fmt.Errorf("-max-in-flight %d is not above 0", o.maxInFlight)
	}
	return nil
}

// consume works on messages of a real cluster until ctx ends.
func consume(ctx context.Context, o options, stdout, stderr io.Writer) error {
	handle := func(m *nsq.Message) error {
		// The work on m.Body goes here. To return nil finishes the message; with an error it comes again later.
		return nil
	}
	consumer, err := start(ctx, o, nsq.HandlerFunc(handle), log.New(stderr, "", log.LstdFlags), nsq.LogLevelInfo)
	if err != nil {
		return err
	}
	begun := time.Now()
	fmt.Fprintf(stdout, "consuming topic %s, channel %s; Ctrl-C stops\n", o.topic, o.channel)
	progress := time.NewTicker(time.Second)
	defer progress.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-progress.C:
			s := consumer.Status()
			fmt.Fprintf(stdout, "%d nsqds, %d messages handled, %d in flight\n", len(s.NSQDs), s.MessagesFinished, s.InFlight)
		}
	}

	err = drain(consumer)
	s := consumer.Stats()
	fmt.Fprintf(stdout, "%d messages handled, %d requeued, %.0f a second\n",
		s.MessagesFinished, s.MessagesRequeued, float64(s.MessagesFinished)/time.Since(begun).Seconds())
	return err
}

// start makes a consumer and connects it.
func start(ctx context.Context, o options, handler nsq.Handler, logger *log.Logger, level nsq.LogLevel) (*nsq.Consumer, error) {
	config := nsq.NewConfig()
	config.MaxInFlight = o.maxInFlight
	config.UserAgent = "quickstart rdyloop-nsq/" + nsq.VERSION
	config.LookupdPollInterval = 5 * time.Second // so that a topic made after the start is soon found

	consumer, err := nsq.NewConsumer(o.topic, o.channel, config)
	if err != nil {
		return nil, err
	}
	consumer.SetLogger(logger, level)
	consumer.AddConcurrentHandlers(handler, min(handlers, o.maxInFlight))

	keep := context.AfterFunc(ctx, consumer.Stop) // Ctrl-C while connecting
	defer keep()
	if err := connect(consumer, o); err != nil {
		return nil, errors.Join(err, drain(consumer)) // some of the addresses may have been right
	}
	return consumer, nil
}

func connect(consumer *nsq.Consumer, o options) error {
	var badAddress *nsq.AddressError
	if len(o.nsqds) > 0 {
		err := consumer.ConnectToNSQDs(o.nsqds) // each must be there now, and is reconnected to for ever
		if errors.As(err, &badAddress) {
			return usageError{err}
		}
		return err
	}
	// An nsqlookupd that can't be reached is asked again and again, so an error means that an address is wrong.
	if err := consumer.ConnectToNSQLookupds(o.lookupds); err != nil {
		return usageError{err}
	}
	return nil
}

// drain stops the consumer: no new messages, and those that handlers have are finished.
func drain(consumer *nsq.Consumer) error {
	ctx, cancel := context.WithTimeout(context.Background(), drainTimeout)
	defer cancel()
	return consumer.Shutdown(ctx)
}
