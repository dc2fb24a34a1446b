// Package nsqtest starts a real nsqd and nsqlookupd for tests and examples, and breaks the links to them on demand.
//
//	func TestConsumer(t *testing.T) {
//		nsqd := nsqtest.StartNSQD(t)
//		err := nsqd.Publish("events", []byte("hello"))
//		...
//		consumer.ConnectToNSQD(nsqd.TCPAddr())
//	}
//
// [StartNSQD] and [StartNSQLookupd] run the servers inside the test process: quick to start, and gone with the test.
// [StartNSQDProcess] runs nsqd as a process of its own, which can be killed without a chance to write anything, and on
// Unix frozen. [StartProxy] puts a TCP proxy before any of them that delays, swallows, trickles, stalls, holds back, cuts and refuses.
// [TempCertificates] and [StartAuthServer] supply what TLS and AUTH need.
//
// # Two ways to start
//
// Each Start function takes a [TB], which *testing.T, *testing.B and *testing.F are: what can't be started fails the test, and
// everything is stopped and removed when the test ends. Each New function returns an error instead, for examples and
// programs, and leaves Close to the caller. The package doesn't import testing.
//
// # Differences from nsqd's own defaults
//
// Servers listen on free ports of 127.0.0.1, below the range that systems use for outgoing connections, so a number
// stays free while its server is stopped. They say nothing unless Logf is set. nsqd looks for timed-out and deferred messages
// every 10ms, and for new channels every 50ms, instead of 100ms and 5s: with its defaults the first requeue with a
// delay in a new channel takes up to 5s. Each nsqd of a process has a node ID of its own, so that message IDs differ.
//
// # Processes
//
// The nsqd process is the running program itself, started again with the environment variable NSQTEST_NSQD: this
// package's init function sees it, runs nsqd and never returns to main. So it works in every test binary that imports the
// package, without a line in TestMain. It ends when the program that started it ends, however that happens.
package nsqtest
