package nsq

import (
	"reflect"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Programs embed messages in structs of their own, and middleware makes new ones with another body. Their answers count
// like those of the message itself, and the first one counts.
func TestCopiesOfAMessageMayAnswer(t *testing.T) {
	copied := func(m *Message) *Message {
		c := reflect.New(reflect.TypeFor[Message]()) // c := *m, which package vet does not like
		c.Elem().Set(reflect.ValueOf(m).Elem())
		return c.Interface().(*Message)
	}
	remade := func(m *Message) *Message {
		c := NewMessage(m.ID, []byte("decoded"))
		c.Delegate = m.Delegate
		return c
	}
	for name, other := range map[string]func(m *Message) *Message{"a copy": copied, "one made by hand": remade} {
		for does, test := range map[string]struct {
			handle func(m, other *Message) error
			want   []string // all commands of that message, without its ID
		}{
			"finishes": {func(_, o *Message) error { o.Finish(); return nil }, []string{"FIN"}},
			"requeues": {func(_, o *Message) error { o.RequeueWithoutBackoff(0); return nil }, []string{"REQ", "FIN"}},
			"finishes first": {func(m, o *Message) error {
				o.Finish()
				m.Requeue(0)
				o.Touch()
				return nil
			}, []string{"FIN"}},
			"is too late": {func(m, o *Message) error {
				m.Finish()
				o.Requeue(0)
				o.Touch()
				return nil
			}, []string{"FIN"}},
			"touches": {func(m, o *Message) error {
				time.Sleep(40 * time.Second)
				o.Touch()
				time.Sleep(40 * time.Second)
				return nil
			}, []string{"TOUCH", "FIN"}},
			"touches, and the message expires": {func(m, o *Message) error {
				o.Touch()
				time.Sleep(61 * time.Second)
				o.Finish()
				return nil
			}, []string{"TOUCH", "FIN"}},
			"answers later": {func(m, o *Message) error {
				m.DisableAutoResponse()
				go func() {
					time.Sleep(time.Second)
					o.Finish()
					m.Finish()
				}()
				return nil
			}, []string{"FIN"}},
		} {
			t.Run(name+" "+does, func(t *testing.T) {
				inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
					done := make(chan struct{}, 10)
					r := newTestConsumer(t, n.cluster, func(cfg *Config) { cfg.MaxInFlight = 10 })
					r.AddHandler(HandlerFunc(func(m *Message) error {
						if m.Attempts > 1 || string(m.Body) != "x" {
							return nil
						}
						defer func() { done <- struct{}{} }()
						return test.handle(m, other(m))
					}))
					require.NoError(t, r.ConnectToNSQD(n.addr))
					id := n.publish("x")[0]
					<-done
					time.Sleep(2 * time.Second)
					var got []string
					for _, e := range n.cluster.snapshot(byKind(entryCommand)) {
						for _, command := range []string{"FIN", "REQ", "TOUCH"} {
							if e.Line == command+" "+id || e.Line == command+" "+id+" 0" {
								got = append(got, command)
							}
						}
					}
					require.Equal(t, test.want, got)
					n.publish("y")
					n.cluster.waitUntil(func() bool { return n.stats().InFlight == 0 })
					require.Equal(t, 1, n.cluster.openConns())
					stopConsumer(t, r, time.Second)
				})
			})
		}
	}
}
