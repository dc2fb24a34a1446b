package nsq

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// ShutdownError says what was left when a shutdown ran out of time. Messages that are left unanswered come again after
// their timeout.
type ShutdownError struct {
	HandlersRunning int   // handlers that had not returned; what they still answer has no effect
	Unanswered      int   // messages that were in flight
	Err             error // why it had to end: the context's cause, or nil for Config.ShutdownTimeout
}

func (e *ShutdownError) Error() string {
	s := fmt.Sprintf("nsq: shutdown ran out of time with %s running and %s unanswered",
		counted(e.HandlersRunning, "handler"), counted(e.Unanswered, "message"))
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap returns Err.
func (e *ShutdownError) Unwrap() error { return e.Err }

// Stop stops the consumer, in the background: wait for StopChan to know when it has. No new message reaches a handler
// from now on. Handlers that run may finish theirs; messages that wait for a handler go back to nsqd at once, which
// costs them an attempt, as nsqd counts. Then the connections are closed. What takes longer than Config.ShutdownTimeout
// is broken off: messages without an answer come again after their timeout.
//
// Stop may be called at any time and any number of times, also before connecting.
func (r *Consumer) Stop() { r.beginStop(r.config.ShutdownTimeout) }

// Shutdown stops the consumer like Stop and waits until it has stopped. The context takes the place of
// Config.ShutdownTimeout: when it ends, what is left is broken off. It returns nil if nothing was, else a
// *ShutdownError. A consumer that is stopping already stops as it would, but no later than the context says.
//
// A handler must not call it, since it waits for the handler.
func (r *Consumer) Shutdown(ctx context.Context) error {
	if ctx == nil {
		ctx = context.Background()
	}
	release := context.AfterFunc(ctx, func() { r.forceNow(context.Cause(ctx)) })
	defer release()
	r.beginStop(-1)
	<-r.StopChan
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stopErr
}

// errShutdownTimeout is the cause of a stop that Config.ShutdownTimeout breaks off.
var errShutdownTimeout = errors.New("nsq: shutdown_timeout is over")

// beginStop starts stopping, once. A negative limit is none.
func (r *Consumer) beginStop(limit time.Duration) {
	r.mu.Lock()
	if limit >= 0 && !r.stopLimited { // be it that Shutdown came before, with more patience
		r.stopLimited = true
		timer := time.AfterFunc(limit, func() { r.forceNow(errShutdownTimeout) })
		context.AfterFunc(r.force, func() { timer.Stop() })
	}
	if r.stopping {
		r.mu.Unlock()
		return
	}
	r.stopping = true
	// Within the lock, or a connect that succeeds right now would not be among conns and yet stay.
	r.cancel(errConsumerStopped) // dials, lookups and waits for the next try
	started := r.started
	var conns []*Conn
	for _, n := range r.nodes {
		if n.conn != nil {
			conns = append(conns, n.conn)
		}
	}
	r.mu.Unlock()
	for _, c := range conns { // not in the background: from here on no handler begins a message
		r.closeConn(c)
	}
	go r.stop(started)
}

// stop takes the consumer apart, from the outside to the inside.
func (r *Consumer) stop(started bool) {
	r.log.logf(LogLevelInfo, "stopping...")
	r.serving.Wait()
	r.lookups.running.Wait()

	r.log.logf(LogLevelInfo, "stopping handlers")
	r.inbox.close()
	r.waitForHandlers()
	if started {
		close(r.rdyStop)
		<-r.rdyDone
	}
	r.lookups.close()
	r.noteWhatIsLeft()
	r.forceNow(nil)
	close(r.StopChan)
}

// waitForHandlers waits until all handlers have returned, or stopping has taken too long.
func (r *Consumer) waitForHandlers() {
	returned := make(chan struct{})
	go func() {
		r.handlers.Wait()
		close(returned)
	}()
	select {
	case <-returned:
	case <-r.force.Done():
		// Both may be true, after a stop without any patience: then nothing is left.
		if r.running() == 0 {
			<-returned
		}
	}
}

func (r *Consumer) noteWhatIsLeft() {
	running, unanswered := r.running(), int(r.abandoned.Load())
	if running == 0 && unanswered == 0 {
		return
	}
	err := &ShutdownError{HandlersRunning: running, Unanswered: unanswered}
	if cause := context.Cause(r.force); cause != errShutdownTimeout {
		err.Err = cause
	}
	r.log.logf(LogLevelWarning, "%s", err)
	r.mu.Lock()
	r.stopErr = err
	r.mu.Unlock()
}
