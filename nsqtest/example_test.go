package nsqtest_test

import (
	"fmt"
	"log"
	"testing"
	"time"

	"github.com/rdyloop/nsq/nsqtest"
)

// A program or an example has no test to end with: it uses New and Close.
func ExampleNewNSQD() {
	nsqd, err := nsqtest.NewNSQD(nsqtest.NSQDOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer nsqd.Close()

	if err := nsqd.CreateChannel("events", "archive"); err != nil {
		log.Fatal(err)
	}
	if err := nsqd.Publish("events", []byte("hello")); err != nil {
		log.Fatal(err)
	}
	if err := nsqd.Restart(); err != nil { // same addresses, same messages
		log.Fatal(err)
	}
	stats, err := nsqd.ChannelStats("events", "archive")
	fmt.Println(stats.Depth, err)
	// Output: 1 <nil>
}

// Consumers that ask nsqlookupd come through a proxy whose address nsqd makes known.
func ExampleStartProxy() {
	_ = func(t *testing.T) {
		lookupd := nsqtest.StartNSQLookupd(t)
		proxy := nsqtest.StartProxy(t, "")
		nsqd := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{
			LookupdTCPAddresses: []string{lookupd.TCPAddr()},
			BroadcastTCPAddr:    proxy.Addr(),
		})
		proxy.SetTarget(nsqd.TCPAddr())

		proxy.Latency(nsqtest.Both, 50*time.Millisecond)
		proxy.CutAfter(nsqtest.ToClient, 10_000) // in the middle of a message, most likely
		// ... and the consumer still gets every message.
	}
}
