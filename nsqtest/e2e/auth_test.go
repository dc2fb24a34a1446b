package e2e

import (
	"testing"
	"time"

	"github.com/rdyloop/nsq"
	"github.com/rdyloop/nsq/nsqtest"
	"github.com/stretchr/testify/require"
)

func TestAuth(t *testing.T) {
	t.Parallel()
	auth := nsqtest.StartAuthServer(t,
		nsqtest.Grant{Secret: "right", Identity: "archivist", Topic: topic, Channels: []string{channel}},
		nsqtest.Grant{Secret: "elsewhere", Topic: topic, Channels: []string{"other"}},
		nsqtest.Grant{Secret: "nothing", NoRights: true},
	)
	n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{AuthHTTPAddresses: []string{auth.Addr()}})
	tests := map[string]struct {
		secret string
		code   string
	}{
		"accepted":                     {"right", ""},
		"refused":                      {"wrong", "E_AUTH_FAILED"},
		"a secret without rights":      {"nothing", "E_UNAUTHORIZED"},
		"the right to another channel": {"elsewhere", "E_UNAUTHORIZED"},
		"missing, so nothing is sent":  {"", ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			l := newLedger(t)
			cfg := newConfig(5)
			cfg.AuthSecret = test.secret
			c := newConsumer(t, cfg, l.handler(nil))
			err := c.ConnectToNSQD(n.TCPAddr())
			switch {
			case test.secret == "":
				require.EqualError(t, err, "Auth Required")
			case test.code != "":
				var refused *nsq.ProtocolError
				require.ErrorAs(t, err, &refused)
				require.Equal(t, test.code, refused.Code)
				require.NotContains(t, err.Error(), test.secret)
			default:
				require.NoError(t, err)
				l.publish(n, 10)
				l.awaitAll()
				require.True(t, client(t, n).Authed)
				require.Equal(t, "archivist", client(t, n).AuthIdentity)
				stop(t, c)
				return
			}
			require.Equal(t, nsq.NodeFailed, nsqdStatus(c, n.TCPAddr()).State)
			require.Zero(t, c.Stats().Connections)
		})
	}
}

// TestAuthorizationExpires while a consumer is connected: nsqd asks again only for the next SUB, so messages go on. The next
// connection has an AUTH of its own.
func TestAuthorizationExpires(t *testing.T) {
	t.Parallel()
	grant := nsqtest.Grant{Secret: "open sesame", TTL: time.Second}
	auth := nsqtest.StartAuthServer(t, grant)
	n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{AuthHTTPAddresses: []string{auth.Addr()}, MsgTimeout: 2 * time.Second})
	p := nsqtest.StartProxy(t, n.TCPAddr())
	l := newLedger(t)
	cfg := newConfig(5)
	cfg.AuthSecret = "open sesame"
	c := startConsumer(t, cfg, l.handler(nil), p.Addr())
	lines := keepLog(t, c)
	l.publish(n, 10)
	l.awaitAll()
	auth.Refuse(true)
	<-time.After(grant.TTL + 100*time.Millisecond)
	l.publish(n, 10)
	l.awaitAll()
	require.EqualValues(t, 1, p.Accepted())
	require.Len(t, auth.Requests(), 1)

	auth.Refuse(false)
	l.fault(p.Addr(), cfg.MaxInFlight+1)
	p.Cut()
	l.publish(n, 10)
	l.awaitAll()
	require.EqualValues(t, 2, p.Accepted())
	require.Len(t, auth.Requests(), 2)
	require.True(t, client(t, n).Authed)
	require.Zero(t, lines.count("ERR"))
}

// TestAuthorizationExpiresInTheHandshake between AUTH and SUB, so that nsqd asks a second time for the same connection.
func TestAuthorizationExpiresInTheHandshake(t *testing.T) {
	t.Parallel()
	grant := nsqtest.Grant{Secret: "open sesame", TTL: time.Second}
	tests := map[string]struct {
		then func(*nsqtest.AuthServer)
		code string
	}{
		"and is renewed":        {func(*nsqtest.AuthServer) {}, ""},
		"and is refused":        {func(a *nsqtest.AuthServer) { a.Refuse(true) }, "E_AUTH_FAILED"},
		"and is no longer ours": {func(a *nsqtest.AuthServer) { a.SetGrants(nsqtest.Grant{Secret: "open sesame", Topic: "another"}) }, "E_UNAUTHORIZED"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			auth := nsqtest.StartAuthServer(t, grant)
			n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{AuthHTTPAddresses: []string{auth.Addr()}})
			p := nsqtest.StartProxy(t, n.TCPAddr())
			p.HoldAt(nsqtest.ToServer, "SUB ")
			l := newLedger(t)
			cfg := newConfig(5)
			cfg.AuthSecret = "open sesame"
			c := newConsumer(t, cfg, l.handler(nil))
			result := make(chan error, 1)
			go func() { result <- c.ConnectToNSQD(p.Addr()) }()
			eventually(t, "AUTH is accepted", func() bool { return len(auth.Requests()) == 1 })
			<-time.After(grant.TTL + 100*time.Millisecond)
			test.then(auth)
			require.NoError(t, p.Heal())
			err := receive(t, "the result of the connect", result)
			require.Len(t, auth.Requests(), 2)
			if test.code != "" {
				code(test.code)(t, err)
				return
			}
			require.NoError(t, err)
			l.publish(n, 10)
			l.awaitAll()
		})
	}
}

// TestAuthIsRefusedForAWhile to a consumer that was connected before: it goes on trying, and is back when it may. The log
// tells of that now and then, not at every try.
func TestAuthIsRefusedForAWhile(t *testing.T) {
	t.Parallel()
	tests := map[string]func(*nsqtest.AuthServer){
		"the server is out of order": func(a *nsqtest.AuthServer) { a.Refuse(true) },
		"the right is gone":          func(a *nsqtest.AuthServer) { a.SetGrants(nsqtest.Grant{Secret: "open sesame", Topic: "another"}) },
		"there is no right at all":   func(a *nsqtest.AuthServer) { a.SetGrants(nsqtest.Grant{Secret: "open sesame", NoRights: true}) },
	}
	for name, refuse := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			grant := nsqtest.Grant{Secret: "open sesame"}
			auth := nsqtest.StartAuthServer(t, grant)
			n := nsqtest.StartNSQD(t, nsqtest.NSQDOptions{AuthHTTPAddresses: []string{auth.Addr()}, MsgTimeout: 2 * time.Second})
			p := nsqtest.StartProxy(t, n.TCPAddr())
			l := newLedger(t)
			cfg := newConfig(5)
			cfg.AuthSecret = "open sesame"
			c := startConsumer(t, cfg, l.handler(nil), p.Addr())
			lines := keepLog(t, c)
			l.publish(n, 10)
			l.awaitAll()

			refuse(auth)
			l.fault(p.Addr(), cfg.MaxInFlight+1)
			p.Cut()
			l.publish(n, 10)
			const tries = 15
			eventually(t, "it goes on trying", func() bool { return p.Accepted() > tries })
			var refused *nsq.ProtocolError
			require.ErrorAs(t, nsqdStatus(c, p.Addr()).LastError, &refused)
			require.LessOrEqual(t, lines.count("ERR"), 7, "of %d tries", tries)
			require.LessOrEqual(t, lines.count("WRN"), 10, "of %d tries", tries)

			auth.SetGrants(grant)
			auth.Refuse(false)
			within(t, cfg.MaxReconnectInterval+slack, "it is connected again", func() bool { return connected(c, p.Addr()) })
			l.awaitAll()
			awaitDrained(t, n)
		})
	}
}
