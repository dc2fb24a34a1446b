// Package fastnsqd is an nsqd for measuring consumers: it sends messages to one of them as fast as it can, holds to RDY as nsqd does,
// and fails unless each message is finished exactly once.
//
// Like nsqd it sends while fewer messages are in flight than RDY says, without counting RDY down. Unlike nsqd it has no queue, no timeouts and no
// output buffer that waits: all messages are the same but for their IDs, and as many as RDY allows go out in one write.
package fastnsqd

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"os"

	"github.com/rdyloop/nsq/nsqtest"
)

// Server serves one consumer.
type Server struct {
	listener net.Listener
	tls      *tls.Config
	messages int
	body     []byte

	ctx    context.Context // until Close
	cancel context.CancelFunc

	done     chan struct{} // closed when the consumer has gone, or none can come
	finished int           // the result; written before done is closed
	err      error
}

// Listen makes a server with so many messages on a free port of the loopback, which runs until Close.
func Listen(messages int, body []byte) (*Server, error) {
	if int64(messages) > maxMessages {
		return nil, fmt.Errorf("fastnsqd: %d messages: there are IDs for %d", messages, int64(maxMessages))
	}
	config, err := selfSigned()
	if err != nil {
		return nil, fmt.Errorf("fastnsqd: %w", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("fastnsqd: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &Server{ctx: ctx, cancel: cancel, listener: l, tls: config, messages: messages, body: body, done: make(chan struct{})}
	go s.serve()
	return s, nil
}

// selfSigned makes a certificate for the loopback.
func selfSigned() (*tls.Config, error) {
	dir, err := os.MkdirTemp("", "fastnsqd-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	files, err := nsqtest.NewCertificates(dir)
	if err != nil {
		return nil, err
	}
	pair, err := tls.LoadX509KeyPair(files.ServerCertFile, files.ServerKeyFile)
	if err != nil {
		return nil, err
	}
	return &tls.Config{Certificates: []tls.Certificate{pair}}, nil
}

// Addr returns where the server listens, as "host:port".
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Wait waits until the consumer has closed its connection, and returns the number of messages that it has finished. That is all of them, or the
// error says what went wrong. It returns early when ctx is done.
func (s *Server) Wait(ctx context.Context) (finished int, err error) {
	select {
	case <-s.done:
		return s.finished, s.err
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
}

// Close ends the server and the connection to its consumer, and waits for that. It may be called twice.
func (s *Server) Close() {
	s.cancel()
	_ = s.listener.Close()
	<-s.done
}

func (s *Server) serve() {
	defer close(s.done)
	nc, err := s.listener.Accept()
	if err != nil {
		s.err = err
		return
	}
	_ = s.listener.Close() // one consumer is all
	defer nc.Close()
	defer context.AfterFunc(s.ctx, func() { _ = nc.Close() })()
	c := newConn(nc, s)
	s.finished, s.err = c.serve()
}
