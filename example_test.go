package nsq_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"time"

	"github.com/rdyloop/nsq"
)

// A consumer that runs until Ctrl-C, and then finishes what it has begun.
func Example() {
	config := nsq.NewConfig()
	config.MaxInFlight = 100

	consumer, err := nsq.NewConsumer("events", "archive", config)
	if err != nil {
		log.Fatal(err) // a name or an option is wrong
	}
	handler := nsq.HandlerFunc(func(m *nsq.Message) error {
		log.Printf("%s", m.Body)
		return nil // FIN
	})
	consumer.AddConcurrentHandlers(handler, 8)
	if err := consumer.ConnectToNSQLookupds([]string{"lookupd-1:4161", "lookupd-2:4161"}); err != nil {
		log.Fatal(err) // an address is wrong
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	<-ctx.Done()

	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := consumer.Shutdown(ctx); err != nil {
		log.Print(err)
	}
}

// mailer is the handler in the examples below.
type mailer struct{ busy bool }

func (h *mailer) HandleMessage(m *nsq.Message) error {
	switch {
	case len(m.Body) == 0:
		return nil // nothing to send, and it will not get better: FIN
	case h.busy:
		m.RequeueWithoutBackoff(10 * time.Second) // later, but go on with the others
		return nil
	case string(m.Body) == "nobody":
		return errors.New("no such mailbox") // REQ with a growing delay, and the consumer backs off
	}
	return nil
}

// answers records what a message is answered. It is an [nsq.MessageDelegate].
type answers struct{ text string }

func (a *answers) OnFinish(*nsq.Message) { a.text = "FIN" }
func (a *answers) OnRequeue(_ *nsq.Message, delay time.Duration, backoff bool) {
	a.text = fmt.Sprintf("REQ after %v, backoff %v", delay, backoff)
}
func (a *answers) OnTouch(*nsq.Message) { a.text = "TOUCH" }

// A handler can be tested without an nsqd: make a message by hand and record its answer. What the handler returns is
// turned into an answer by the consumer, so here it is just an error.
func ExampleNewMessage() {
	var got answers
	message := nsq.NewMessage(nsq.MessageID{'1'}, []byte("hello"))
	message.Delegate = &got

	handler := &mailer{busy: true}
	fmt.Println(handler.HandleMessage(message))
	fmt.Println(got.text)

	message.Finish() // an answered message stays as it is
	fmt.Println(got.text)
	// Output:
	// <nil>
	// REQ after 10s, backoff false
	// REQ after 10s, backoff false
}

func ExampleHandlerFunc() {
	handler := nsq.HandlerFunc(func(m *nsq.Message) error {
		fmt.Printf("%s\n", m.Body)
		return nil
	})
	fmt.Println(handler.HandleMessage(nsq.NewMessage(nsq.MessageID{}, []byte("hello"))))
	// Output:
	// hello
	// <nil>
}

// A message may be kept, and be answered by another goroutine.
func ExampleMessage_DisableAutoResponse() {
	batch := make(chan *nsq.Message, 100)
	handler := nsq.HandlerFunc(func(m *nsq.Message) error {
		m.DisableAutoResponse()
		batch <- m
		return nil
	})
	var got answers
	message := nsq.NewMessage(nsq.MessageID{}, []byte("hello"))
	message.Delegate = &got
	_ = handler.HandleMessage(message)
	fmt.Println(message.HasResponded())

	for range len(batch) {
		m := <-batch
		m.Finish()
	}
	fmt.Println(message.HasResponded(), got.text)
	// Output:
	// false
	// true FIN
}

func ExampleConfig_Set() {
	config := nsq.NewConfig()
	fmt.Println(config.Set("max-in-flight", "200"), config.MaxInFlight)
	fmt.Println(config.Set("msg_timeout", 90*time.Second), config.MsgTimeout)
	fmt.Println(config.Set("msg_timeout", 1500), config.MsgTimeout) // milliseconds

	err := config.Set("deflate_level", 10)
	fmt.Println(err)
	var refused *nsq.OptionError
	if errors.As(err, &refused) {
		fmt.Println(refused.Option, refused.Value, refused.Reason)
	}
	// Output:
	// <nil> 200
	// <nil> 1m30s
	// <nil> 1.5s
	// invalid deflate_level ! 10 > 9
	// deflate_level 10 > 9
}

func ExampleConfig_Validate() {
	config := nsq.NewConfig()
	config.Snappy, config.Deflate = true, true
	fmt.Println(config.Validate())
	// Output:
	// Snappy true excludes Deflate true
}

func ExampleConfigFlag() {
	config := nsq.NewConfig()
	flags := flag.NewFlagSet("archive", flag.ContinueOnError)
	flags.Var(&nsq.ConfigFlag{Config: config}, "consumer-opt", "option of the consumer, as name,value (may be repeated)")

	err := flags.Parse([]string{"-consumer-opt=max_in_flight,200", "-consumer-opt=snappy"})
	fmt.Println(err, config.MaxInFlight, config.Snappy)
	// Output:
	// <nil> 200 true
}

// Shutdown says what was left when its time ran out.
func ExampleConsumer_Shutdown() {
	consumer, err := nsq.NewConsumer("events", "archive", nsq.NewConfig())
	if err != nil {
		log.Fatal(err)
	}
	consumer.SetLogger(nil, nsq.LogLevelError)

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err = consumer.Shutdown(ctx)
	var left *nsq.ShutdownError
	if errors.As(err, &left) {
		fmt.Println(left.HandlersRunning, "handlers are still running")
	}
	fmt.Println(err)
	// Output:
	// <nil>
}

// A health check: is each nsqd connected, and has somebody told us about them?
func ExampleConsumer_Status() {
	consumer, err := nsq.NewConsumer("events", "archive", nsq.NewConfig())
	if err != nil {
		log.Fatal(err)
	}
	consumer.SetLogger(nil, nsq.LogLevelError)
	defer func() { consumer.Stop(); <-consumer.StopChan }()

	status := consumer.Status()
	for _, nsqd := range status.NSQDs {
		if nsqd.State != nsq.NodeConnected {
			fmt.Println(nsqd.Address, "is", nsqd.State, nsqd.LastError, "next try at", nsqd.NextTry)
		}
	}
	for _, lookupd := range status.NSQLookupds {
		if lookupd.LastError != nil {
			fmt.Println(lookupd.Address, lookupd.LastError)
		}
	}
	fmt.Println(len(status.NSQDs), "nsqds,", status.InFlight, "messages in flight")
	// Output:
	// 0 nsqds, 0 messages in flight
}

// nsqd's refusals are errors with its code.
func ExampleProtocolError() {
	var err error = nsq.ErrIdentify{Reason: "E_BAD_BODY IDENTIFY heartbeat interval (70000) is invalid"}

	var refused *nsq.ProtocolError
	if errors.As(err, &refused) {
		fmt.Println(refused.Code, refused.Fatal())
	}
	// Output:
	// E_BAD_BODY true
}
