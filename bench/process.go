package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"
)

// Whatever is measured runs in a process of its own: this program again, in a role. Parent and child exchange JSON values over the
// child's standard input and output, a question and an answer at a time. The end of its input ends a child, so none outlives its parent.

const (
	stopTimeout = 15 * time.Second // what a child gets to end by itself; then it is killed
	endTimeout  = 10 * time.Second // after which a child that can't end ends itself
)

// role is what a child does. It returns when the parent has no more questions (receive: io.EOF) or ctx is done. An error is sent to
// the parent as the answer to its question.
type role func(ctx context.Context, p *parent) error

// reply is what a child writes: a value or an error.
type reply struct {
	Value json.RawMessage `json:",omitempty"`
	Error string          `json:",omitempty"`
}

// child is the parent's end. One goroutine at a time may use it.
type child struct {
	role  string
	ctx   context.Context // ends the process when it is done
	cmd   *exec.Cmd
	stdin io.WriteCloser
	in    *json.Encoder
	out   *json.Decoder
}

// startChild starts this program in a role. When ctx is done the process is made to end. The caller must call stop.
func startChild(ctx context.Context, role string) (*child, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, program, role)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	cmd.Cancel = stdin.Close // a child that is told to end cleans up
	cmd.WaitDelay = stopTimeout
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", role, err)
	}
	return &child{role: role, ctx: ctx, cmd: cmd, stdin: stdin, in: json.NewEncoder(stdin), out: json.NewDecoder(stdout)}, nil
}

// ask sends a question and waits for the answer.
func (c *child) ask(question, answer any) error {
	if err := c.in.Encode(question); err != nil {
		return c.failed(err)
	}
	var r reply
	if err := c.out.Decode(&r); err != nil {
		return c.failed(err)
	}
	if r.Error != "" {
		return c.failed(errors.New(r.Error))
	}
	if err := json.Unmarshal(r.Value, answer); err != nil {
		return c.failed(err)
	}
	return nil
}

// failed says which process it was, and why it was made to end if it was.
func (c *child) failed(err error) error {
	if cause := context.Cause(c.ctx); cause != nil {
		err = cause
	}
	return fmt.Errorf("%s: %w", c.role, err)
}

// stop ends the process and waits for its end.
func (c *child) stop() error {
	closeErr := c.stdin.Close()
	kill := time.AfterFunc(stopTimeout, func() { _ = c.cmd.Process.Kill() })
	defer kill.Stop()
	if err := c.cmd.Wait(); err != nil {
		return c.failed(err)
	}
	return closeErr
}

// parent is the child's end.
type parent struct {
	questions chan json.RawMessage // closed when there will be no more
	out       *json.Encoder
}

// receive waits for the next question. It returns io.EOF when there is none.
func (p *parent) receive(question any) error {
	data, ok := <-p.questions
	if !ok {
		return io.EOF
	}
	return json.Unmarshal(data, question)
}

// send answers a question.
func (p *parent) send(answer any) error {
	data, err := json.Marshal(answer)
	if err != nil {
		return err
	}
	return p.out.Encode(reply{Value: data})
}

// playChild plays the role that startChild gave to this process, if it is a child.
func playChild() (code int, ok bool) {
	if len(os.Args) != 2 {
		return 0, false
	}
	r, ok := roles[os.Args[1]]
	if !ok {
		return 0, false
	}
	return play(r, os.Stdin, os.Stdout), true
}

// play plays a role until it ends or stdin does, and returns the exit code.
func play(r role, stdin io.Reader, stdout io.Writer) int {
	// Ctrl-C is sent to all, and the parent says what it means. Answering a parent that is gone must not be the end: there may be files to remove.
	signal.Ignore(os.Interrupt, syscall.SIGPIPE)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	p := &parent{questions: make(chan json.RawMessage), out: json.NewEncoder(stdout)}
	go func() {
		defer cancel()
		defer close(p.questions)
		in := json.NewDecoder(stdin)
		for {
			var data json.RawMessage
			if in.Decode(&data) != nil {
				time.AfterFunc(endTimeout, func() { os.Exit(3) })
				return
			}
			select {
			case p.questions <- data:
			case <-ctx.Done():
				return
			}
		}
	}()
	err := r(ctx, p)
	if err == nil || errors.Is(err, io.EOF) || ctx.Err() != nil {
		return 0
	}
	if p.out.Encode(reply{Error: err.Error()}) != nil {
		fmt.Fprintln(os.Stderr, err) // the parent is gone, or nearly
	}
	return 1
}
