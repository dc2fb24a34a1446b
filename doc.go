// Package nsq is a client library for consumers of NSQ, see https://nsq.io.
//
//	consumer, err := nsq.NewConsumer("events", "archive", nsq.NewConfig())
//	...
//	consumer.AddConcurrentHandlers(nsq.HandlerFunc(handle), 8)
//	err = consumer.ConnectToNSQLookupd("127.0.0.1:4161")
//	...
//	err = consumer.Shutdown(ctx)
//
// Programs written for go-nsq compile against it by changing the import line; README.md lists what they will see
// differently.
//
// # Consuming
//
// A [Consumer] reads one channel of a topic. It finds the nsqds through nsqlookupds ([Consumer.ConnectToNSQLookupds]), is
// told them ([Consumer.ConnectToNSQDs]), or both. From then on it keeps itself connected: a lost nsqd is tried again
// within a quarter of a second, then less and less often, up to every 15 seconds; nsqds that come and go are noticed by
// polling the nsqlookupds. Neither needs any code of yours.
//
// A [Handler] gets one message at a time and answers it by what it returns: nil is FIN, an error is REQ. See [Message]
// for the other ways to answer. A message is answered once, on the connection that brought it; what comes later, or too
// late, does nothing. NSQ delivers at least once, so a handler must bear to see a message again.
//
// # How much at a time
//
// Config.MaxInFlight is how many messages may be unanswered, over all nsqds together; it should be no less than the number
// of concurrent handlers. It is handed out to the nsqds as RDY counts, whose sum never exceeds it. Shares that idle nsqds don't
// use go to the busy ones. [Consumer.ChangeMaxInFlight] changes the number at any time; 0 pauses.
//
// When messages fail the consumer backs off: it takes nothing for a while (Config.BackoffMultiplier,
// Config.MaxBackoffDuration), then tries a single message, and so on until one succeeds for each that failed.
// [Message.RequeueWithoutBackoff] is for failures that say nothing about the next message; Config.MaxBackoffDuration 0 switches backoff off.
//
// # Stopping
//
// [Consumer.Shutdown] takes a context and waits; [Consumer.Stop] does the same in the background and closes
// Consumer.StopChan at its end. Running handlers finish, the rest goes back to nsqd. Afterwards nothing of the consumer is left but handlers
// that did not return in time.
//
// # What it tells
//
// [Consumer.Status] is a snapshot with a row per nsqd and per nsqlookupd. Errors are values to ask with errors.Is
// ([ErrHeartbeatTimeout], [ErrTLSRefused], …) or errors.As (*[ProtocolError] carries nsqd's code, *[OptionError] names the option). Log lines go to
// standard error, or where [Consumer.SetLogger] says.
//
// # Configuration
//
// [NewConfig] makes a [Config] with all defaults. Assign its fields, or use [Config.Set] with the names that nsqd's own tools use
// for their options; [ConfigFlag] puts those on a command line.
//
// # Lower down
//
// [Conn], [Command] and [ReadUnpackedResponse] speak the protocol without a Consumer, for tools.
// See https://nsq.io/clients/tcp_protocol_spec.html.
package nsq
