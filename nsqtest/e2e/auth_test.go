package e2e

import (
	"testing"

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
